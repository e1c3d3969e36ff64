"""What commands share: finding users, and the progress of long work on the standard error."""

import time
from collections.abc import Callable
from typing import Any

from django.contrib.auth import get_user_model
from django.core.management.base import CommandError, OutputWrapper


def user_named(username: str, kind: str = "", **also: bool) -> Any:
    """The user with this name and the fields ``also``, which ``kind`` describes. Raises CommandError."""
    users = get_user_model()._default_manager.filter(username=username, **also)
    # Databases refuse NUL, and bytes of the shell that are not UTF-8.
    user = users.first() if username.isprintable() else None
    if user is None:
        hint = "" if kind else " Users appear with their first request."
        raise CommandError(f"There is no {kind}user {username!r}.{hint}")
    return user


def reason_of(text: str) -> str:
    """The text of ``--reason``. Raises CommandError."""
    if not text.strip():
        raise CommandError("--reason must not be empty.")
    if not text.isprintable():  # for example bytes of the shell that are not UTF-8
        raise CommandError("--reason must be printable text.")
    return text.strip()


def progress(out: OutputWrapper, line_seconds: float = 5) -> Callable[[str, int, int], None]:
    """A function that writes a line at the end of each step and every ``line_seconds``: step, done, total."""
    shown_at = time.monotonic()

    def show(step: str, done: int, total: int) -> None:
        nonlocal shown_at
        if done >= total or time.monotonic() - shown_at >= line_seconds:
            shown_at = time.monotonic()
            out.write(f"{done} of {total} {step}", str)

    return show
