"""The UI message streams of the AI SDK (``useChat``): ``chunks`` renders a run, ``requests`` reads what a client sends,
``messages`` lists a chat, ``views`` has the routes.
"""
