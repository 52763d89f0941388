"""Widgets. They draw records they are given and know neither screens nor the engine."""
