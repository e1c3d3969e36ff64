"""CPU of a run beside the least that a durable run can cost on this machine: three transactions of plain SQL, and one
request to a bare Django view that reads one row.

``make bench``, or ``python -m benchmarks.floor --runs 400 --rounds 5``. It starts its own PostgreSQL and Redis.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg

from benchmarks.floor_sql import make_schema, one_run
from benchmarks.harness import Connection, Metric, cpu_seconds, ratio_by_rounds, report, wait_until
from benchmarks.sides import Path, Service, read, service, start_runs
from tests.stack.postgres import PostgresServer
from tests.stack.process import free_port, python

TITLE = "floor"
CLIENTS = 16
# During the first runs, connections prepare their statements, and PostgreSQL fills its caches.
WARM_RUNS, RUNS, ROUNDS = 600, 400, 5
# A floor's run takes a fraction of a run's CPU, which the system counts in steps of 10 ms.
FLOOR_RUNS_PER_RUN = 3


@dataclass(frozen=True)
class Cpu:
    """Milliseconds per run: of what answers requests, of what executes runs, of PostgreSQL."""

    web: float
    workers: float
    database: float

    @property
    def total(self) -> float:
        return self.web + self.workers + self.database


class Floor:
    def __init__(self, connection: psycopg.Connection[Any], postgres: PostgresServer, side: Service) -> None:
        self.connection, self.postgres, self.side = connection, postgres, side
        self.port = free_port()
        command = python(
            "-m", "granian", "--interface", "asgi", "--http", "1", "--port", str(self.port), "benchmarks.bare_wsgi"
        )
        web = side.stack.add("bare-web", command)
        assert web is not None
        self.web = web
        chat = Connection(side.port, side.tokens[0]).json("POST", "/api/v1/chats", {})["id"]
        self.row = Path(f"/plain/{chat}")
        wait_until(self.answers, 30)

    def answers(self) -> bool:
        try:
            read(self.port, [self.row], 1, 1)
        except OSError:
            return False
        return True

    def view(self, count: int) -> tuple[float, float]:
        """CPU milliseconds of a request: of the web process, of PostgreSQL."""
        pids = [[self.web.pid], [self.side.processes["PostgreSQL"].pid]]
        before = [cpu_seconds(each) for each in pids]
        read(self.port, [self.row], count, CLIENTS)
        web, database = ((cpu_seconds(each) - was) * 1000 / count for each, was in zip(pids, before, strict=True))
        return web, database

    def sql(self, count: int) -> tuple[float, float]:
        """CPU milliseconds of three transactions: of this process, of PostgreSQL."""
        before, begun = cpu_seconds([self.postgres.pid]), time.process_time()
        for _ in range(count):
            one_run(self.connection)
        took = time.process_time() - begun
        return took * 1000 / count, (cpu_seconds([self.postgres.pid]) - before) * 1000 / count

    def measure(self, count: int) -> Cpu:
        web, reading = self.view(count)
        executing, writing = self.sql(count)
        return Cpu(web, executing, reading + writing)


@contextmanager
def floor_beside(side: Service) -> Any:
    with PostgresServer(durable=True) as postgres, psycopg.connect(postgres.url()) as connection:
        make_schema(connection)
        yield Floor(connection, postgres, side)


def one_round(side: Service, runs: int) -> Cpu:
    cpu = start_runs(side, runs, CLIENTS).cpu
    return Cpu(cpu["web"], sum(each for name, each in cpu.items() if name.startswith("runs-")), cpu["PostgreSQL"])


def updates_of_runs(database_url: str) -> tuple[int, int]:
    """How many updates of runs' rows changed no index, and how many there were. PostgreSQL counts with a delay."""
    with psycopg.connect(database_url) as connection:
        query = "SELECT n_tup_hot_upd, n_tup_upd FROM pg_stat_user_tables WHERE relname = 'runs_run'"
        row = connection.execute(query).fetchone()
    assert row is not None
    hot, updates = row
    return hot, updates


def measure(runs: int = RUNS, rounds: int = ROUNDS, warm: int = WARM_RUNS) -> list[Metric]:
    with service() as side, floor_beside(side) as floor:
        one_round(side, warm)
        floor.measure(warm)
        ours, least = [], []
        for _ in range(rounds):
            least.append(floor.measure(runs * FLOOR_RUNS_PER_RUN))
            ours.append(one_round(side, runs))
        hot, updates = updates_of_runs(side.stack.environment["DATABASE_URL"])
    return [*metrics(ours, least), Metric("updates of runs' rows that changed no index (HOT)", f"{hot} of {updates}")]


def metrics(ours: list[Cpu], least: list[Cpu]) -> list[Metric]:
    """The medians over the rounds."""
    parts = [
        ("total", "CPU of web, run workers and PostgreSQL per run", "a view and three transactions", "≤ 3.0"),
        ("database", "PostgreSQL's CPU per run", "the same, PostgreSQL", "≤ 2.5"),
        ("web", "CPU of the web process per run", "one request to a bare view", ""),
        ("workers", "CPU of the run workers per run", "the program of three transactions", ""),
    ]
    found = []
    for part, name, baseline, target in parts:
        measured, floor = ([getattr(cpu, part) for cpu in side] for side in (ours, least))
        value, against = (f"{statistics.median(values):.2f} ms" for values in (measured, floor))
        found.append(Metric(name, value, f"{against}, {baseline}", ratio_by_rounds(measured, floor), target, "lower"))
    return found


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.floor", description=__doc__)
    parser.add_argument("--runs", type=int, default=RUNS, help=f"runs of a round (default {RUNS})")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"rounds, by turns (default {ROUNDS})")
    parser.add_argument("--warm", type=int, default=WARM_RUNS, help=f"runs before the rounds (default {WARM_RUNS})")
    report(TITLE, measure(**vars(parser.parse_args(arguments))))


if __name__ == "__main__":
    main(sys.argv[1:])
