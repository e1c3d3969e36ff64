"""How soon the runs of a killed worker continue on another, at a short lease, and whether a worker loses its lease
while all cores are busy. On PostgreSQL and Redis.

``make bench``, or ``python -m tests.stack.run_services python -m benchmarks.takeover --lease 2 --kills 5``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from benchmarks.harness import Metric, report, side_by_side, wait_until
from benchmarks.runs import CLIENTS, USERS, Bench
from tests.stack.process import python
from tests.stack.stack import Stack

LEASE_SECONDS = 2.0
KILLS = 5
RUNS = (1, 200)
BUSY_SECONDS = 40.0
LOOPS_PER_CORE = 3
# Longer than the benchmark, so that every run executes to its end.
MESSAGE = "/stream 20 500\n/wait 600"


class Takeovers:
    def __init__(self, bench: Bench) -> None:
        self.bench = bench

    def start(self, count: int) -> None:
        chats = self.bench.chats(count)
        connections = [[self.bench.connection(user) for user in range(USERS)] for _ in range(CLIENTS)]

        def start(client: int, number: int) -> None:
            path = f"/api/v1/chats/{chats[number]}/runs"
            connections[client][number % USERS].json("POST", path, {"message": MESSAGE})

        side_by_side(CLIENTS, count, start)
        wait_until(lambda: self.bench.one("SELECT count(*) FROM runs_run WHERE status = 'queued'") == 0, 60)

    def kill(self, count: int) -> float:
        """The seconds from ``kill -9`` of a worker with about ``count`` runs until another has the last of them."""
        bench = self.bench
        self.start(count * len(bench.workers))
        owners = (
            "SELECT w.pid FROM runs_worker w JOIN runs_run r ON r.worker_id = w.id ORDER BY r.created_at DESC LIMIT 1"
        )
        pid = bench.one(owners)
        name = next(name for name in bench.workers if bench.pid(name) == pid)
        killed = time.time()
        bench.stack.kill(name)
        row = bench.sql.execute("SELECT id FROM runs_worker WHERE pid = %s", (pid,)).fetchone()
        assert row is not None
        owned = "SELECT id FROM runs_run WHERE worker_id = %s"
        runs = [run for (run,) in bench.sql.execute(owned, row).fetchall()]
        moved = "SELECT count(*) FROM runs_run WHERE id = ANY(%s) AND status = 'running' AND worker_id <> %s"
        wait_until(lambda: bench.one(moved, runs, row[0]) == len(runs), 60)
        last = "SELECT extract(epoch FROM max(running_since)) FROM runs_run WHERE id = ANY(%s)"
        seconds = float(str(bench.one(last, runs))) - killed
        bench.sql.execute("UPDATE runs_run SET cancel_requested_at = now() WHERE status = 'running'")
        wait_until(lambda: bench.one("SELECT count(*) FROM runs_run WHERE status = 'running'") == 0, 60)
        bench.stack.restart(name)
        return seconds

    def lost(self) -> int:
        return int(str(self.bench.one("SELECT coalesce(sum(lease_losses), 0) FROM runs_run")))


@contextmanager
def busy_cores() -> Iterator[int]:
    """Programs that compute without end, LOOPS_PER_CORE for each core."""
    count = (os.cpu_count() or 1) * LOOPS_PER_CORE
    loops = [subprocess.Popen(python("-c", "while True: pass")) for _ in range(count)]
    try:
        yield count
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.takeover", description=__doc__)
    parser.add_argument("--lease", type=float, default=LEASE_SECONDS, help=f"seconds (default {LEASE_SECONDS:g})")
    parser.add_argument("--kills", type=int, default=KILLS, help=f"of each kind (default {KILLS})")
    parser.add_argument("--busy", type=float, default=BUSY_SECONDS, help=f"seconds (default {BUSY_SECONDS:g})")
    given = parser.parse_args(arguments)
    services = {"database_url": os.environ["TEST_DATABASE_URL"], "redis_url": os.environ["TEST_REDIS_URL"]}
    settings = {"RUN_USER_LIMIT": "0", "SIGNUP_CREDITS": "1000000", "RUN_LEASE_SECONDS": f"{given.lease:g}"}
    metrics = []
    with Stack(**services, run_workers=2, environment=settings) as stack:
        takeovers = Takeovers(Bench(stack))
        for count in RUNS:
            took = sorted(takeovers.kill(count) for _ in range(given.kills))
            value = f"p50 {took[len(took) // 2]:.2f} s, longest {took[-1]:.2f} s"
            name = f"kill -9 to the last claim by another worker, lease {given.lease:g} s, about {count} runs"
            metrics.append(Metric(name, value, target="≤ 3 s"))
        before = takeovers.lost()
        takeovers.start(RUNS[-1])
        with busy_cores() as loops:
            time.sleep(given.busy)
        lost = takeovers.lost() - before
        name = f"leases lost in {given.busy:g} s beside {loops} busy programs, {RUNS[-1]} runs executing"
        metrics.append(Metric(name, str(lost), target="0"))
    report("Takeover", metrics)


if __name__ == "__main__":
    main(sys.argv[1:])
