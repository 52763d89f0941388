"""GGUF files as a source of packs: checked headers, block formats, names, config, tokenizer."""
