"""Date formats of the admin."""
