"""Waits for a run before an MCP call is answered: a body that the web server sends from its event loop.

A call that waits holds no thread and no database connection; the hub of the process's streams wakes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from django.http import StreamingHttpResponse

from config.limits.lease import Lease
from runs.events import StreamType
from runs.models import Awaiting, RunStatus
from runs.streams.hub import Hub, Opening
from runs.streams.reads import Event

WAIT_MAX_SECONDS = 60
# The places of each user, over all processes. Their lease leaves some time for the answer after the wait.
places = Lease(
    "mcp-waits", WAIT_MAX_SECONDS + 10.0, "You have too many calls that wait; use waitSeconds 0, or try again later."
)


@dataclass(frozen=True)
class Started:
    """A started run for which the call waits before it answers."""

    opening: Opening
    wait_seconds: float


class WaitingResponse(StreamingHttpResponse):
    """A ``LiveResponse``. ``answer`` returns the body when the wait is over; it is called on a thread. A server other
    than ours sends the answer at once.
    """

    def __init__(self, started: Started, place: str, answer: Callable[[], bytes]) -> None:
        self.started, self.place, self.answer = started, place, answer
        super().__init__(self.answer_now(), content_type="application/json")

    def answer_now(self) -> Iterator[bytes]:
        places.free(self.place)
        yield self.answer()

    def open(self) -> Wait:
        return Wait(self)


class Wait:
    """Ends when the run has ended, waits for an answer or awaits the caller's app, or when its time is over."""

    def __init__(self, response: WaitingResponse) -> None:
        self.response = response
        self.stream = Hub.open().join(response.started.opening)
        self.over = False

    async def next(self) -> bytes | None:
        if self.over:
            return None
        self.over = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.response.started.wait_seconds):
                while (batch := await self.stream.next()) is not None and not any(map(ends_wait, batch)):
                    pass
        return await Hub.open().ask(self.response.answer)

    def close(self) -> None:
        self.stream.close()

    def leave(self) -> None:
        self.stream.leave()
        places.free(self.response.place)


def ends_wait(event: Event) -> bool:
    if event.type == StreamType.TOOL_PARKED:
        return json.loads(event.data)["awaiting"] == Awaiting.CLIENT
    is_status = event.type == StreamType.RUN_STATUS
    return event.final or (is_status and json.loads(event.data)["status"] == RunStatus.WAITING)
