"""How far a command is whose work may take minutes. Results go to the standard output, this to the standard error."""

from __future__ import annotations

import time

from django.core.management.base import OutputWrapper

BAR = 30
LINE_SECONDS = 5.0


class Progress:
    """A bar on a terminal. Elsewhere lines: at the end of each step, and every ``line_seconds``. Use it with
    ``contextlib.closing``, so that other output begins on a line of its own.
    """

    def __init__(self, out: OutputWrapper, line_seconds: float = LINE_SECONDS) -> None:
        self.out, self.line_seconds = out, line_seconds
        self.step, self.shown_at = "", time.monotonic()

    def show(self, step: str, done: int, total: int) -> None:
        text = f"{done} of {total} {step}"
        if self.out.isatty():
            if step != self.step:
                self.close()
            filled = BAR * done // max(total, 1)
            self.out.write(f"\r[{'#' * filled}{'.' * (BAR - filled)}] {text}\x1b[K", ending="")
            self.out.flush()
        elif done >= total or time.monotonic() - self.shown_at >= self.line_seconds:
            self.shown_at = time.monotonic()
            self.out.write(text)
        self.step = step

    def close(self) -> None:
        if self.step and self.out.isatty():
            self.out.write("")
        self.step = ""
