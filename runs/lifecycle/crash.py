"""Crash points: places where fault tests make a process die or freeze (``tests/stack/constants``)."""

from collections.abc import Callable
from functools import partial

from django.db import transaction

reached: Callable[[str], None] | None = None  # only fault tests set it


def crash_point(name: str) -> None:
    if reached is not None:
        reached(name)


def crash_after_commit(status: str) -> None:
    """A crash point after the commit, before the ``on_commit`` functions that are registered later."""
    if reached is not None:
        transaction.on_commit(partial(reached, f"committed_{status}"))
