"""Many open streams over two stream processes: memory, start and latency of deltas. The clients are processes too."""

from __future__ import annotations

import asyncio
import multiprocessing
import resource
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection as Pipe
from typing import Any

from benchmarks.harness import Metric, cpu_seconds, milliseconds, rss
from benchmarks.scale_rows import connect, copy_run, real_run, users_of
from benchmarks.sides import Service, service
from benchmarks.streams import RUNS_A_TICK, TICK, Client, Writer, start_server

PROCESSES = 2
STREAMS_A_USER = 50
# Streams that one client opens at a time.
OPENING = 16
# File descriptors of a process that are not streams.
SPARE_FILES = 200
SETTLE_SECONDS = 3
WAITING = "SELECT id, user_id FROM runs_run WHERE status = 'waiting' ORDER BY id LIMIT %s"


def listen(port: int, runs: Sequence[tuple[str, str]], pipe: Pipe) -> None:
    """A client process. It sends the seconds that each stream took to open, and, when the other side has sent anything
    a second time, the latencies of the deltas since the first time.
    """
    asyncio.run(_listen(port, runs, pipe))


async def _listen(port: int, runs: Sequence[tuple[str, str]], pipe: Pipe) -> None:
    client, places = Client(port), asyncio.Semaphore(OPENING)

    async def open_one(run_id: str, token: str) -> None:
        async with places:
            await client.open(run_id, token)

    await asyncio.gather(*(open_one(*run) for run in runs))
    pipe.send(client.starts)
    await asyncio.to_thread(pipe.recv)
    client.latencies.clear()
    pipe.send(None)
    await asyncio.to_thread(pipe.recv)
    pipe.send((client.latencies, sum(not task.done() for task in client.tasks)))
    client.close()


def measure(streams: int, seconds: int) -> list[Metric]:
    """``streams`` or, if a process may not open so many files, fewer."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    streams = min(streams, (files - SPARE_FILES) * PROCESSES)
    users = -(-streams // STREAMS_A_USER)
    with (
        service(users=users, STREAMS_PER_USER=str(STREAMS_A_USER), STREAM_CONNECTIONS_MAX=str(streams)) as side,
        connect(side) as database,
    ):
        copy_run(side, real_run(side, "/ask Anyone?", "waiting"), streams)
        tokens = dict(zip(users_of(database), side.tokens, strict=True))
        runs = [(run_id, tokens[user_id]) for run_id, user_id in database.execute(WAITING, (streams,))]
        return open_streams(side, runs, seconds)


def open_streams(side: Service, runs: list[tuple[str, str]], seconds: int) -> list[Metric]:
    servers = [start_server(side.stack, f"stream-{number}") for number in range(PROCESSES)]
    pids = [process.pid for process, _ in servers]
    empty, begun = [rss(pid) for pid in pids], time.perf_counter()
    context = multiprocessing.get_context("spawn")
    pipes: list[Any] = []
    for number, (_, port) in enumerate(servers):
        mine, its = context.Pipe()
        pipes.append(mine)
        context.Process(target=listen, args=(port, runs[number::PROCESSES], its), daemon=True).start()
    starts = [start for pipe in pipes for start in pipe.recv()]
    opening = time.perf_counter() - begun
    time.sleep(SETTLE_SECONDS)
    each = [(rss(pid) - before) * PROCESSES / len(runs) for pid, before in zip(pids, empty, strict=True)]
    idle = used_in(pids, SETTLE_SECONDS)
    for pipe in pipes:
        pipe.send("begin")
        pipe.recv()
    cpu = cpu_seconds(pids)
    sent = write(Writer(side.stack), runs, seconds)
    time.sleep(SETTLE_SECONDS)
    cpu = cpu_seconds(pids) - cpu
    latencies: list[float] = []
    still_open = 0
    for pipe in pipes:
        pipe.send("end")
        found, held = pipe.recv()
        latencies += found
        still_open += held
    if (len(latencies), still_open) != (sent, len(runs)):
        raise RuntimeError(f"{len(latencies)} of {sent} deltas arrived, {still_open} of {len(runs)} streams are open")
    per_second = f"{sent / seconds:.0f} a second over {len(runs):,} streams"
    return [
        Metric(f"memory a stream, {len(runs):,} open on {PROCESSES} processes", f"{max(each) / 1024:.1f} KiB"),
        Metric("request to first event, 32 at a time", milliseconds(starts), f"all are open after {opening:.0f} s"),
        Metric(f"delta, commit to client, {per_second}", milliseconds(latencies), target="p99 ≤ 250 ms"),
        Metric("CPU of the stream processes, silent", f"{idle * 100:.1f} % of a core"),
        Metric("CPU of the stream processes a delta", f"{cpu / sent * 1000:.2f} ms"),
    ]


def used_in(pids: list[int], seconds: float) -> float:
    """The share of a core that the processes use."""
    before = cpu_seconds(pids)
    time.sleep(seconds)
    return (cpu_seconds(pids) - before) / seconds


def write(writer: Writer, runs: list[tuple[str, str]], seconds: float) -> int:
    """Write deltas to all runs in turns. Returns their number."""
    sent, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        writer.write([runs[(sent * 7 + number) % len(runs)][0] for number in range(RUNS_A_TICK)])
        sent += RUNS_A_TICK
        time.sleep(TICK)
    return sent
