"""Pure stream parsers of model output: pieces of text in; reasoning, text and tool calls out.

READ FIRST: events.py, base.py (what formats share); formats.py chooses one for a model.
"""
