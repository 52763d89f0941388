"""The engine: model, tiers and decode loop. Outside code uses `moet_desk.engine.handle` only."""
