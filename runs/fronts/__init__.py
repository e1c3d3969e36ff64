"""The protocols of chat front ends, which render the streams of runs. ``rendering`` has what the protocols share,
``body`` sends a rendered stream, ``starts`` starts runs. In the package of a protocol, ``chunks`` or ``events`` renders
runs and lists messages, ``requests`` reads what a client sends, and ``views`` has the routes of ``runs.urls``.
"""
