"""Tests of many streams in one process: the number of queries does not grow with the number of streams."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from config.kernel.ids import new_id
from runs.streams import reads
from runs.streams.hub import Hub, Opening, Stream
from runs.streams.reads import Event

STREAMS, RUNS = 300, 150


class Database:
    """Replaces the queries of ``reads``. It counts them and answers from ``last``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.last: dict[str, int] = {}
        self.asked: Counter[str] = Counter()
        self.together: dict[str, set[int]] = {"positions": set(), "tails": set()}
        for name in ("positions", "tails", "live_credentials", "page"):
            monkeypatch.setattr(reads, name, getattr(self, name))

    def positions(self, run_ids: list[str]) -> dict[str, int]:
        self.asked["positions"] += 1
        self.together["positions"].add(len(run_ids))
        return {run_id: self.last[run_id] for run_id in run_ids}

    def tails(self, after: dict[str, int]) -> tuple[list[tuple[str, Event]], bool]:
        self.asked["tails"] += 1
        found = [
            (run_id, Event(index, "message.delta", str(index)))
            for run_id, known in after.items()
            for index in range(known + 1, self.last[run_id] + 1)
        ]
        return found, False

    def live_credentials(self, users: set[int], keys: set[str]) -> tuple[set[int], set[str]]:
        self.asked["live_credentials"] += 1
        return users, keys

    def page(self, *_: Any) -> list[Event]:
        self.asked["page"] += 1
        return []


async def until(predicate: Callable[[], bool]) -> None:
    for _ in range(1000):
        if predicate():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come to pass")


async def heard(stream: Stream) -> list[int]:
    while (events := await stream.next()) == []:
        continue
    assert events is not None
    return [event.index for event in events]


async def end(hub: Hub) -> None:
    """Ends what the hub does. A process does not: its streams close, and then its event loop ends."""
    left = set(hub.tasks)
    while left:
        for task in left:
            task.cancel()
        # Again, because the client of Redis can lose a cancel while it connects.
        _, left = await asyncio.wait(left, timeout=0.1)
    hub.threads.shutdown(wait=False, cancel_futures=True)


@pytest.fixture
def with_streams(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Run ``work(hub, database, streams)`` with open streams, two per run, without Redis."""
    settings.CACHE_REDIS_URL = "redis://127.0.0.1:1"
    monkeypatch.setattr("runs.streams.hub.STREAM_POLL_SECONDS", 0.02)
    monkeypatch.setattr("runs.streams.hub.STREAM_AUTH_SECONDS", 0.05)
    database = Database(monkeypatch)

    async def main(work: Any) -> None:
        hub = Hub()
        run_ids = [new_id("run") for _ in range(RUNS)]
        database.last = dict.fromkeys(run_ids, 1)
        streams = [
            hub.join(Opening(run_id=run_ids[number % RUNS], after=1, last=1, final=None, user_id=1))
            for number in range(STREAMS)
        ]
        try:
            await work(hub, database, streams)
        finally:
            await end(hub)

    return lambda work: asyncio.run(asyncio.wait_for(main(work), 30))


def test_idle_streams_share_their_queries(with_streams: Any) -> None:
    async def work(hub: Hub, database: Database, streams: list[Stream]) -> None:
        await until(lambda: database.asked["positions"] >= 10 and database.asked["live_credentials"] >= 3)
        # Each query covers all runs. There is no query for a single stream.
        assert database.together["positions"] == {RUNS}
        assert database.asked["page"] == 0
        # The tails are read only when the streams open, for many runs per query.
        assert database.asked["tails"] <= 3

    with_streams(work)


def test_new_events_of_many_runs_are_read_in_shared_queries(with_streams: Any) -> None:
    async def work(hub: Hub, database: Database, streams: list[Stream]) -> None:
        await until(lambda: database.asked["positions"] >= 2)
        before = database.asked["tails"]
        database.last = dict.fromkeys(database.last, 2)
        assert await asyncio.gather(*(heard(stream) for stream in streams)) == [[2]] * STREAMS
        assert database.asked["tails"] - before <= 4
        assert database.asked["page"] == 0

    with_streams(work)


def test_closed_stream_is_removed_from_the_hub(with_streams: Any) -> None:
    async def work(hub: Hub, database: Database, streams: list[Stream]) -> None:
        for stream in streams:
            stream.leave()
        assert (hub.count, hub.channels) == (0, {})
        asked = database.asked["positions"]
        await asyncio.sleep(0.2)
        # One query may have been in progress.
        assert database.asked["positions"] <= asked + 1

    with_streams(work)
