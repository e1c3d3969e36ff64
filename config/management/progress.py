"""How far a command is whose work may take minutes. Results go to the standard output, this to the standard error."""

from __future__ import annotations

import time
from collections.abc import Callable

from django.core.management.base import OutputWrapper

LINE_SECONDS = 5.0


def progress(out: OutputWrapper, line_seconds: float = LINE_SECONDS) -> Callable[[str, int, int], None]:
    """A function that writes a line at the end of each step and every ``line_seconds``: step, done, total."""
    shown_at = time.monotonic()

    def show(step: str, done: int, total: int) -> None:
        nonlocal shown_at
        if done >= total or time.monotonic() - shown_at >= line_seconds:
            shown_at = time.monotonic()
            out.write(f"{done} of {total} {step}")

    return show
