"""Moet Desk: very large mixture-of-experts models on one consumer GPU, for one person at a desk."""

__version__ = "0.1.0"
