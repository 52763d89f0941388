"""Parts a model is built from. Each block owns its weights and knows nothing of families."""
