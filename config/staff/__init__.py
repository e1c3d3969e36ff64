"""The shared parts of the admin: read-only lists that stay fast, confirmed actions, the throttled sign-in.

What staff see and do with the tables of an app is in that app's ``admin.py``.
"""
