"""The protocols of chat front ends, as renderings of run streams: ``rendering`` is what they share, ``body`` sends one,
``starts`` starts runs for them. Each protocol has its modules; their routes are in ``runs.urls``.
"""
