"""The OpenAI-compatible endpoint. It knows the engine only through `engine.handle`."""
