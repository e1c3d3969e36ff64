"""What the commands about a person share."""

from __future__ import annotations

from typing import Any

from django.contrib.auth import get_user_model
from django.core.management.base import CommandError


def user_named(username: str) -> Any:
    user = get_user_model()._default_manager.filter(username=username).first() if "\0" not in username else None
    if user is None:
        raise CommandError(f"There is no user {username!r}.")
    return user
