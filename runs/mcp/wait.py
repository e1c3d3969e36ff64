"""Waiting for a run on a thread that answers a request: the run's events, until there is nothing to wait for.

The thread sleeps and holds no database connection meanwhile; the hub of the process's streams wakes it.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Generator

from django.conf import settings
from django.db import connection

from config.outbound.loop import shared
from runs.events import StreamType
from runs.mcp.tools import WAIT_MAX_SECONDS
from runs.models import RunStatus
from runs.streams.hub import Opening
from runs.streams.places import Places
from runs.streams.reads import Event
from runs.streams.servers import background

# How many threads of this process may wait: a thread that waits answers no other request.
places = threading.BoundedSemaphore(settings.MCP_WAITS_MAX)
# The places of each user over all processes, with some time for the answer after the wait.
user_places = Places(
    "mcp-waits", WAIT_MAX_SECONDS + 10.0, "You have too many calls that wait; use waitSeconds 0, or try again later."
)


def follow(opening: Opening, seconds: float) -> Generator[Event | None, None, None]:
    """The run's events without its text; None when nothing has happened for a while.

    Ends when the run has ended or waits for an answer, after ``seconds``, or at once if MCP_WAITS_MAX threads of this
    process wait already.
    """
    deadline = time.monotonic() + seconds
    if seconds <= 0 or not places.acquire(blocking=False):
        return
    if not connection.in_atomic_block:
        connection.close()
    batches: queue.SimpleQueue[list[Event] | None] = queue.SimpleQueue()
    listening = shared.submit(_listen(opening, batches))
    try:
        while (left := deadline - time.monotonic()) > 0:
            try:
                batch = batches.get(timeout=left)
            except queue.Empty:
                return
            if batch is None:
                return
            shown = [event for event in batch if event.numbered and event.type != StreamType.MESSAGE_DELTA]
            if not shown:
                yield None
            yield from shown
            statuses = [json.loads(event.data)["status"] for event in shown if event.type == StreamType.RUN_STATUS]
            if RunStatus.WAITING in statuses or any(event.final for event in batch):
                return
    finally:
        listening.cancel()
        places.release()


async def _listen(opening: Opening, batches: queue.SimpleQueue[list[Event] | None]) -> None:
    try:
        stream = background.join(opening)
        try:
            while (batch := await stream.next()) is not None:
                batches.put(batch)
        finally:
            stream.leave()
    finally:
        batches.put(None)
