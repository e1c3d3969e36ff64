"""The run worker: one event loop that executes all runs of its process.

Each module may import those before it: transcript, history and model_places, process, session,
heartbeat and contacts, requests, context, calls, turns, loop, engine.
"""
