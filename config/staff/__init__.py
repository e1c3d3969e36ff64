"""What the admin of every app is made of: read-only lists that stay fast, confirmed actions, the throttled sign-in.

Here are the parts; each app's ``admin.py`` says what staff see and do with its own tables.
"""
