"""The protocols of chat front ends, which render the streams of runs. ``rendering`` has what the protocols share,
``views`` sends rendered streams, ``starts`` starts runs. The package of a protocol has ``chunks`` or ``events``, which
renders runs and lists messages, and ``views``, which reads requests.
"""
