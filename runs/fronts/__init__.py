"""The protocols of chat front ends, as renderings of run streams: ``rendering`` is what they share, ``body`` sends one,
``starts`` starts runs for them. Of each protocol, a module renders runs and lists chats (``chunks``, ``events``),
``requests`` reads what a client sends, and ``views`` has the routes of ``runs.urls``.
"""
