"""AG-UI 1.0, and the routes with which CopilotKit needs no runtime of its own: ``events`` renders a run, ``requests``
reads what a client sends, ``messages`` lists a chat, ``views`` has the routes.
"""
