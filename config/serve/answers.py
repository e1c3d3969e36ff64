"""Calls Django on a thread, and the head of its answer."""

from __future__ import annotations

import contextvars
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.utils import formatdate
from functools import lru_cache
from typing import Any

from config.api.live import KEY, Body
from config.serve.requests import Request, envelope

logger = logging.getLogger(__name__)

Header = tuple[str, str]
BODILESS = ("1", "204", "304")
PART_BYTES = 64 * 1024


@dataclass(slots=True)
class Answer:
    """Status line, headers and the body: ``content``, and after it ``rest`` or a ``live`` body."""

    status: str
    headers: list[Header]
    content: bytes = b""
    rest: Rest | None = None
    live: Callable[[], Body] | None = None

    @property
    def length(self) -> int | None:
        return next((int(value) for name, value in self.headers if name.lower() == "content-length"), None)

    def head(self, version: str, *, keep_alive: bool) -> tuple[bytes, bool, bool]:
        """The head's bytes, whether the body is chunked, and whether the connection may serve another request."""
        lines = [f"HTTP/1.1 {self.status}", f"Date: {date(int(time.time()))}"]
        lines += [f"{name}: {value}" for name, value in self.headers]
        chunked = False
        if not self.status.startswith(BODILESS) and self.length is None:
            if self.rest is None and self.live is None:
                lines.append(f"Content-Length: {len(self.content)}")
            elif version == "1.1":
                chunked = True
                lines.append("Transfer-Encoding: chunked")
            else:
                keep_alive = False  # the end of the connection is the end of the body
        if not keep_alive:
            lines.append("Connection: close")
        elif version == "1.0":
            lines.append("Connection: keep-alive")
        return "\r\n".join([*lines, "", ""]).encode("latin1"), chunked, keep_alive


class Rest:
    """The further parts of a body. Each part is made on a thread, with the context of the first one's thread."""

    def __init__(self, response: Any, parts: Iterator[bytes]) -> None:
        self.response, self.parts = response, parts
        self.context = contextvars.copy_context()

    def next(self) -> bytes | None:
        return self.context.run(next, self.parts, None)

    def close(self) -> None:
        self.context.run(close, self.response)


class File:
    """A file that Django answers with (``wsgi.file_wrapper``), in parts of a size that is worth a change of threads."""

    def __init__(self, file: Any, size: int = 0) -> None:
        self.file = file

    def __iter__(self) -> Iterator[bytes]:
        while part := self.file.read(PART_BYTES):
            yield part

    def close(self) -> None:
        close(self.file)


def answer(application: Any, request: Request) -> Answer:
    """Call Django. Works on a thread, and closes the request."""
    try:
        return _answer(application, request)
    except Exception:
        logger.exception("a request failed outside of Django")
        return Answer(*envelope(500))
    finally:
        request.close()


def _answer(application: Any, request: Request) -> Answer:
    started: list[Any] = []
    request.environ["wsgi.file_wrapper"] = File
    response = application(request.environ, lambda *given: started.extend(given))
    status, headers = started[:2]
    if KEY in request.environ and status.startswith("200 "):
        live = request.environ[KEY]
        close(response)
        admitted = live.admitted()
        if admitted is live:
            return Answer(status, headers, live=live.open)
        return Answer(f"{admitted.status_code} {admitted.reason_phrase}", list(admitted.items()), b"".join(admitted))
    parts = iter(response)
    # Libraries wrap responses: what does not say that it is whole may be large, or may never end.
    if getattr(response, "streaming", not isinstance(response, (list, tuple))):
        return Answer(status, headers, next(parts, b""), Rest(response, parts))
    content = b"".join(parts)
    close(response)
    return Answer(status, headers, content)


def close(response: Any) -> None:
    if hasattr(response, "close"):
        response.close()


@lru_cache(maxsize=1)
def date(second: int) -> str:
    return formatdate(second, usegmt=True)
