"""How a transcript is kept within a model's window. ``fit`` is the door: it shortens the transcript until the next
request fits. ``plan`` measures, decides how, and records each step; ``summary`` asks models for summaries.
"""
