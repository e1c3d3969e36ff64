"""The service at sizes of a large installation: finished and waiting runs, users, open streams, run workers.

``python -m benchmarks.scale [PART …]``; ``--help`` lists the parts and their sizes. Each part starts its own PostgreSQL
and Redis, and fails if a run does not complete or, where the database is small, if an invariant does not hold.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import psycopg

from benchmarks import scale_streams
from benchmarks.harness import Connection, Metric, milliseconds, ratio_by_rounds, report, side_by_side, wait_until
from benchmarks.scale_rows import connect, copy_run, real_run, users_of
from benchmarks.sides import Load, Path, Service, service, start_runs

CLIENTS = 16
WARM_RUNS = 400
# The invariants read whole tables.
CHECKED_RUNS = 50_000
LOAD_SECONDS = 1800
# Ten events and ten rows of the ledger.
CALLS = (
    '/say Good\n/call calculate {"expression": "6*7"}\n/call calculate {"expression": "6*7"}\n/usage 100 100\n/say Done'
)
QUESTION = "/ask Shall I continue?\n/say Done"
# The CPU seconds, of the process and PostgreSQL, of each scheduled task and of what a scrape of /metrics reads.
JOBS = """
import json, time
from django.conf import settings
from benchmarks.harness import cpu_seconds
from config.celery import app
from runs.metrics import gauges
app.loader.import_default_modules()
works = {{name: app.tasks[each["task"]] for name, each in settings.CELERY_BEAT_SCHEDULE.items()}}
works["the gauges of runs"] = lambda: list(gauges())
def used():
    return time.process_time() + cpu_seconds([{postgres}])
found = {{}}
for name, work in works.items():
    work()
    begun = used()
    for _ in range({calls}):
        work()
    found[name] = (used() - begun) / {calls}
print(json.dumps(found))
"""
PENDING = """
    SELECT waitpoint.id, run.id, run.user_id FROM runs_waitpoint waitpoint JOIN runs_run run ON run.id = run_id
    WHERE waitpoint.status = 'PENDING' ORDER BY md5(run.id) LIMIT %s
"""
RESUMED = """
    SELECT run_id, extract(epoch FROM max(created_at))::float FROM runs_runevent
    WHERE run_id = ANY(%s) AND type = 'run.status' AND data LIKE '%%"status":"running"%%' GROUP BY run_id
"""
BY_USER = """
    SELECT user_id, count(*), bool_and(status = 'completed'), extract(epoch FROM max(finished_at))::float,
           extract(epoch FROM avg(finished_at - created_at))::float
    FROM runs_run WHERE chat_id = ANY(%s) GROUP BY user_id
"""


def check_invariants(side: Service, runs: int) -> None:
    if runs <= CHECKED_RUNS:
        side.stack.manage("check_invariants")


# --- two sides -------------------------------------------------------------------------------------------------------


def of_service(cpu: Mapping[str, float]) -> float:
    """Of web, run workers and PostgreSQL."""
    return sum(each for name, each in cpu.items() if name in ("web", "PostgreSQL") or name.startswith("runs-"))


def by_turns(measured: Service, baseline: Service, runs: int, rounds: int) -> tuple[list[Load], list[Load]]:
    for side in (measured, baseline):
        start_runs(side, WARM_RUNS, CLIENTS)
    found: tuple[list[Load], list[Load]] = [], []
    for _ in range(rounds):
        for side, loads in zip((measured, baseline), found, strict=True):
            loads.append(start_runs(side, runs, CLIENTS))
    return found


def compared(loads: list[Load], baseline: list[Load], beside: str, rate: str = "", cpu: str = "") -> list[Metric]:
    """``rate`` and ``cpu`` are the targets of their ratios. The values are medians over the rounds."""
    values: dict[str, tuple[str, Callable[[Load], float], str]] = {
        "runs/s, POST to completed": ("/s", lambda load: load.rate, rate),
        "POST run, 16 clients, p50": (" ms", lambda load: statistics.median(load.posts) * 1000, ""),
        "CPU per run of web, run workers and PostgreSQL": (" ms", lambda load: of_service(load.cpu), cpu),
        "CPU per run of PostgreSQL": (" ms", lambda load: load.cpu["PostgreSQL"], ""),
    }
    metrics = []
    for name, (unit, of_load, target) in values.items():
        mine, its = ([of_load(load) for load in side] for side in (loads, baseline))
        value, against = (f"{statistics.median(each):.1f}{unit}" for each in (mine, its))
        metrics.append(Metric(name, value, f"{against}, {beside}", ratio_by_rounds(mine, its), target))
    return metrics


def finished(options: argparse.Namespace) -> list[Metric]:
    with service() as full, service() as empty:
        run_id = real_run(full, CALLS, "completed")
        begun = time.perf_counter()
        rows = copy_run(full, run_id, options.finished)
        seconds = time.perf_counter() - begun
        with connect(full) as database:
            row = database.execute("SELECT pg_database_size(current_database())").fetchone()
        assert row is not None
        loads = by_turns(full, empty, options.runs, options.rounds)
        check_invariants(full, options.finished)
    shown = ", ".join(f"{rows[table]:,} {table}" for table in ("runs_run", "runs_runevent", "credits_ledgerentry"))
    made = Metric("the database", f"{shown}: {row[0] / 2**30:.1f} GiB, filled in {seconds:.0f} s")
    return [made, *compared(*loads, "an empty database", cpu="≤ 1.1")]


def workers(options: argparse.Namespace) -> list[Metric]:
    with service(run_workers=4) as four, service(run_workers=2) as two:
        loads = by_turns(four, two, options.runs, options.rounds)
        for side in (four, two):
            check_invariants(side, 0)
    return compared(*loads, "two run workers")


# --- waiting runs ----------------------------------------------------------------------------------------------------


def jobs(side: Service, calls: int) -> dict[str, float]:
    script = JOBS.format(postgres=side.processes["PostgreSQL"].pid, calls=calls)
    found: dict[str, float] = json.loads(side.stack.manage("shell", "--no-imports", "-c", script).splitlines()[-1])
    return found


def wake(side: Service, database: psycopg.Connection[Any], count: int, per_second: float) -> tuple[list[float], ...]:
    """Answer so many waiting runs. Returns for each run the seconds from the request to running, and from its response
    to running.
    """
    pending = database.execute(PENDING, (count,)).fetchall()
    tokens = dict(zip(users_of(database), side.tokens, strict=True))
    connections = [Connection(side.port) for _ in range(CLIENTS)]
    asked: dict[str, float] = {}
    answered: dict[str, float] = {}
    begun = time.time()

    def answer(client: int, number: int) -> None:
        waitpoint, run, user = pending[number]
        time.sleep(max(0.0, begun + number / per_second - time.time()))
        asked[run] = time.time()
        body = {"kind": "CLARIFICATION", "answer": "Yes"}
        connections[client].json("POST", f"/api/v1/waitpoints/{waitpoint}/respond", body, token=tokens[user])
        answered[run] = time.time()

    side_by_side(CLIENTS, len(pending), answer)
    runs = list(asked)
    completed = "SELECT count(*) FROM runs_run WHERE id = ANY(%s) AND status = 'completed'"
    wait_until(lambda: database.execute(completed, (runs,)).fetchone() == (count,), 60, 0.2)
    resumed = dict(database.execute(RESUMED, (runs,)).fetchall())
    return tuple([max(0.0, resumed[run] - since[run]) for run in runs] for since in (asked, answered))


def waiting(options: argparse.Namespace) -> list[Metric]:
    count, calls = options.waiting, options.calls
    with service() as side, connect(side) as database:
        start_runs(side, WARM_RUNS, CLIENTS)
        copy_run(side, real_run(side, QUESTION, "waiting"), 2 * options.answers)
        wake(side, database, options.answers, options.per_second)
        few = wake(side, database, options.answers, options.per_second)
        jobs(side, calls)
        work, memory = jobs(side, calls), side.memory()
        copy_run(side, real_run(side, QUESTION, "waiting"), count)
        many_work, many_memory = jobs(side, calls), side.memory()
        many = wake(side, database, options.answers, options.per_second)
        check_invariants(side, count)
    metrics = [
        Metric(f"{since}, {count:,} runs wait", milliseconds(all_), milliseconds(some), target=target)
        for since, all_, some, target in zip(
            ("request of respond → running", "response of respond → running"),
            many,
            few,
            ("", "p99 ≤ 60 ms"),
            strict=True,
        )
    ]
    for name, used in work.items():
        value, baseline = (f"{seconds * 1000:.2f} ms" for seconds in (many_work[name], used))
        metrics.append(Metric(f"CPU of {name}", value, f"{baseline}, one run waits", many_work[name] / used, "flat"))
    for name, before in memory.items():
        value, baseline = (f"{size / 2**20:.1f} MiB" for size in (many_memory[name], before))
        each = f"{(many_memory[name] - before) / count:.0f} bytes a waiting run"
        metrics.append(Metric(f"memory of {name}", f"{value}, {each}", baseline))
    return metrics


# --- users -----------------------------------------------------------------------------------------------------------


@dataclass
class Crowd:
    """Seconds from the first POST to the last end, and of each POST; CPU milliseconds per run; by user, the seconds
    until the end of the last run and the mean seconds of a run.
    """

    runs: int
    seconds: float
    posts: list[float]
    cpu: dict[str, float]
    ends: list[float] = field(default_factory=list)
    means: list[float] = field(default_factory=list)


def crowd(side: Service, database: psycopg.Connection[Any], owners: Sequence[tuple[int, str]], count: int) -> Crowd:
    """``count`` runs of the owners (id, token) in turns, each in a chat of its own."""
    chats = [f"chat_{uuid4().hex[:26]}" for _ in range(count)]
    users = [owners[number % len(owners)][0] for number in range(count)]
    made = "INSERT INTO chats_chat (id, user_id, has_line) SELECT *, false FROM unnest(%s::text[], %s::int[])"
    database.execute(made, (chats, users))
    connections = [Connection(side.port) for _ in range(CLIENTS)]

    def start(client: int, number: int) -> None:
        path = Path(f"/api/v1/chats/{chats[number]}/runs", owners[number % len(owners)][1])
        side.start(connections[client], path)

    cpu, begun = side.cpu(), time.time()
    posts = side_by_side(CLIENTS, count, start)
    live = "SELECT EXISTS (SELECT FROM runs_run WHERE status IN ('queued', 'running', 'waiting'))"
    wait_until(lambda: database.execute(live).fetchone() == (False,), LOAD_SECONDS, 0.5)
    each = {name: (used - cpu[name]) * 1000 / count for name, used in side.cpu().items()}
    rows = database.execute(BY_USER, (chats,)).fetchall()
    if sum(row[1] for row in rows) != count or not all(row[2] for row in rows):
        raise RuntimeError(f"not all of {count} runs completed")
    ends = [row[3] - begun for row in rows]
    return Crowd(count, max(ends), posts, each, ends, [row[4] for row in rows])


def users(options: argparse.Namespace) -> list[Metric]:
    limit = str(options.user_limit)
    with service(users=options.users, RUN_USER_LIMIT=limit) as side, connect(side) as database:
        start_runs(side, WARM_RUNS, CLIENTS)
        owners = list(zip(users_of(database), side.tokens, strict=True))
        many = crowd(side, database, owners, options.users * options.runs_per_user)
        one = crowd(side, database, owners[:1], options.one_user)
        check_invariants(side, many.runs + one.runs)
    cpu, its_cpu = of_service(many.cpu), of_service(one.cpu)
    rate, its_rate = many.runs / many.seconds, one.runs / one.seconds
    low, _, high = statistics.quantiles(many.ends, n=4)
    middle, slowest = statistics.median(many.means), max(many.means)
    alone = f"{one.runs:,} runs of one user, of which {limit} at a time"
    return [
        Metric(f"{options.users:,} users, {options.runs_per_user} runs each", f"{many.seconds:.0f} s, no error"),
        Metric("runs/s, POST to completed", f"{rate:.0f}/s", f"{its_rate:.0f}/s, {alone}", rate / its_rate),
        Metric("CPU per run of web, run workers and PostgreSQL", f"{cpu:.1f} ms", f"{its_cpu:.1f} ms", cpu / its_cpu),
        Metric("POST run, 16 clients", milliseconds(many.posts), milliseconds(one.posts)),
        Metric("a user's last run ends: third quartile, first quartile", f"{high:.1f} s", f"{low:.1f} s", high / low),
        Metric(
            "mean time of a user's runs: slowest user, median", f"{slowest:.2f} s", f"{middle:.2f} s", slowest / middle
        ),
    ]


# --- the program -----------------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[argparse.Namespace], list[Metric]]] = {
    "workers": workers,
    "users": users,
    "streams": lambda options: scale_streams.measure(options.streams, options.seconds),
    "waiting": waiting,
    "finished": finished,
}
# Option → the default and what it says.
SIZES: dict[str, tuple[int, str]] = {
    "runs": (400, "workers, finished: runs of a round"),
    "rounds": (5, "workers, finished: rounds, by turns"),
    "users": (1000, "users: number of users"),
    "runs-per-user": (20, "users: runs of each"),
    "one-user": (5000, "users: runs of one user, as the baseline"),
    "user-limit": (20, "users: RUN_USER_LIMIT"),
    "streams": (10_000, "streams: open streams, half on each process"),
    "seconds": (20, "streams: how long deltas are written"),
    "waiting": (100_000, "waiting: waiting runs"),
    "answers": (400, "waiting: how many are answered"),
    "per-second": (20, "waiting: how many are answered in a second"),
    "calls": (50, "waiting: calls of each scheduled task"),
    "finished": (1_000_000, "finished: runs, with ten events and ten rows of the ledger each"),
}


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART", help=", ".join(PARTS))
    for name, (default, help) in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{help} (default {default:,})")
    options = parser.parse_args(arguments)
    for name in options.parts or PARTS:
        report(f"scale: {name}", PARTS[name](options))


if __name__ == "__main__":
    main(sys.argv[1:])
