"""The run worker: one event loop that executes all runs of its process.

Each module may import those before it: journal and model_places, context, session, text and heartbeat, calls, turns,
loop, engine.
"""
