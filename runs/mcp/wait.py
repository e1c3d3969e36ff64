"""Waiting for a run before the answer to an MCP call: a body that the web server sends from its event loop.

A call that waits holds no thread and no database connection; the hub of the process's streams wakes it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

from django.http import HttpResponseBase, StreamingHttpResponse

from runs.events import StreamType
from runs.mcp.tools import WAIT_MAX_SECONDS, Started
from runs.models import RunStatus
from runs.streams.places import Places
from runs.streams.reads import Event
from runs.streams.servers import background

# The places of each user over all processes, with some time for the answer after the wait.
places = Places(
    "mcp-waits", WAIT_MAX_SECONDS + 10.0, "You have too many calls that wait; use waitSeconds 0, or try again later."
)


class WaitingResponse(StreamingHttpResponse):
    """A ``LiveResponse``: ``answer`` makes the body when the wait is over, on a thread. ``shown`` makes what is sent
    meanwhile of an event, or of None when nothing has happened for a while.

    Any other server than ours sends the answer at once.
    """

    def __init__(
        self,
        started: Started,
        place: str | None,
        answer: Callable[[], bytes],
        shown: Callable[[Event | None], bytes] = lambda event: b"",
        **options: Any,
    ) -> None:
        self.started, self.place, self.answer, self.shown = started, place, answer, shown
        super().__init__(self.answer_now(), **options)

    def answer_now(self) -> Iterator[bytes]:
        places.free(self.place)
        yield self.answer()

    def admitted(self) -> HttpResponseBase:
        return self

    def open(self) -> Wait:
        return Wait(self)


class Wait:
    """Ends when the run has ended or waits for an answer, or when its time is over."""

    def __init__(self, response: WaitingResponse) -> None:
        self.response = response
        self.stream = background.join(response.started.opening)
        self.deadline = asyncio.get_running_loop().time() + response.started.wait_seconds
        self.over = False

    async def next(self) -> bytes | None:
        if self.over:
            return None
        try:
            async with asyncio.timeout_at(self.deadline):
                while (batch := await self.stream.next()) is not None:
                    events = [event for event in batch if event.numbered and event.type != StreamType.MESSAGE_DELTA]
                    self.over = any(event.final or is_waiting(event) for event in batch)
                    shown = b"".join(map(self.response.shown, events)) or self.response.shown(None)
                    if self.over:
                        return shown + await background.ask(self.response.answer)
                    if shown:
                        return shown
        except TimeoutError:
            pass
        self.over = True
        return await background.ask(self.response.answer)

    def close(self) -> None:
        self.stream.close()

    def leave(self) -> None:
        self.stream.leave()
        places.free(self.response.place)


def is_waiting(event: Event) -> bool:
    return event.type == StreamType.RUN_STATUS and json.loads(event.data)["status"] == RunStatus.WAITING
