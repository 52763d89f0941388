"""Pure stream parsers of model output, one file per format: pieces of text in, events out."""
