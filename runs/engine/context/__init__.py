"""Keeps a transcript within a model's window: ``fit`` is the interface."""
