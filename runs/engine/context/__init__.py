"""How a transcript is kept within a model's window: ``fit`` is the door."""
