"""The run worker: one event loop that executes all runs of its process. Each module may import those before it in this
list: transcript, history and process, session, contacts, requests, context, calls, loop, engine.
"""
