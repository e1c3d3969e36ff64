"""What the apps' ``admin.py`` share: read-only lists that stay fast, confirmed actions, the throttled sign-in."""
