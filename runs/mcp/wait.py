"""Waiting for a run on a thread that answers a request: what happens to it, until there is nothing to wait for.

The thread sleeps meanwhile and holds no database connection; the process's streams, which share one look-up, wake it.
"""

from __future__ import annotations

import asyncio
import json
import queue
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.db import connection

from config.outbound.loop import shared
from runs.models import FINAL_RUN_STATUSES, RunStatus
from runs.streams.hub import Opening
from runs.streams.servers import background

RESTING = {str(status) for status in (*FINAL_RUN_STATUSES, RunStatus.WAITING)}


@dataclass(frozen=True, slots=True)
class Event:
    """An event of the run's stream."""

    index: int
    type: str
    data: dict[str, Any]


class Places:
    """How many threads of this process wait. Each is one that answers no request, so there are few."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.taken = 0

    def take(self) -> bool:
        with self.lock:
            if self.taken >= settings.MCP_WAITS_MAX:
                return False
            self.taken += 1
            return True

    def leave(self) -> None:
        with self.lock:
            self.taken -= 1


places = Places()


def follow(opening: Opening, seconds: float) -> Generator[Event | None, None, None]:
    """The run's events, None where nothing has happened for a while. Ends when the run has ended or waits for an
    answer, after ``seconds``, or at once if too many threads of this process wait already.
    """
    deadline = time.monotonic() + seconds
    if seconds <= 0 or not places.take():
        return
    if not connection.in_atomic_block:
        connection.close()
    chunks: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    listening = shared.submit(_listen(opening, chunks))
    try:
        while (left := deadline - time.monotonic()) > 0:
            try:
                chunk = chunks.get(timeout=left)
            except queue.Empty:
                return
            if chunk is None:
                return
            events = list(_events(chunk))
            if not events:
                yield None
            yield from events
            if any(event.type == "run.status" and event.data["status"] in RESTING for event in events):
                return
    finally:
        listening.cancel()
        places.leave()


async def _listen(opening: Opening, chunks: queue.SimpleQueue[bytes | None]) -> None:
    try:
        stream = background.join(opening)
        try:
            while (chunk := await stream.next()) is not None:
                chunks.put(chunk)
        finally:
            stream.leave()
    except asyncio.CancelledError:
        raise
    finally:
        chunks.put(None)


def _events(chunk: bytes) -> Iterator[Event]:
    """The events of a piece of a stream; what is said word by word is left out."""
    for block in chunk.decode("utf-8", "replace").split("\n\n"):
        fields = dict(line.partition(": ")[::2] for line in block.split("\n") if ": " in line and line[0] != ":")
        if "id" in fields and fields["event"] != "message.delta":
            yield Event(int(fields["id"]), fields["event"], json.loads(fields["data"]))
