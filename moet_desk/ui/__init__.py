"""The terminal app. `ui.app.run` starts it; nothing here imports torch."""
