"""The ledger on PostgreSQL: hold + capture on one account, reports over millions of rows, and their audit.

``make bench``, or ``python -m tests.stack.run_services python -m benchmarks ledger``.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import psutil
import psycopg

from benchmarks import ledger_data, ledger_plain
from benchmarks.harness import Metric, report
from tests.stack import postgres

CONNECTIONS = (1, 4, 16)
PROCESSES = 2
PAIR_SECONDS = 1.5
PAIR_ROUNDS = 3
REPORT_ROUNDS = 15
HOLD = {"tool_key": "draw", "chat_id": "chat_1", "run_id": "run_1", "price": {"perCall": ledger_plain.ESTIMATE}}
SPENDING = "account_id = %(user)s AND type IN ('CAPTURE', 'USAGE', 'REFUND')"
NET = "sum(CASE type WHEN 'REFUND' THEN -amount ELSE amount END), max(created_at)"
# The same reports from the ledger rows, without totals.
FROM_ROWS = {
    "summary": f"SELECT tool_key, sum(amount), count(*), max(created_at) FROM credits_ledgerentry WHERE {SPENDING}"
    " AND type <> 'REFUND' AND created_at >= %(start)s GROUP BY 1",
    "by chat": f"SELECT chat_id, {NET} FROM credits_ledgerentry WHERE {SPENDING} AND created_at >= %(start)s"
    " GROUP BY 1",
    "by day": "SELECT (created_at AT TIME ZONE 'UTC')::date, sum(amount), count(*) FROM credits_ledgerentry WHERE"
    f" {SPENDING} AND type <> 'REFUND' AND created_at >= %(start)s GROUP BY 1",
    "one chat": f"SELECT run_id, tool_key, {NET} FROM credits_ledgerentry WHERE {SPENDING} AND chat_id = %(chat)s"
    " GROUP BY 1, 2",
}


# --- hold + capture --------------------------------------------------------------------------------------------------
def pairs(connections: int, make: Callable[[], Callable[[], None]]) -> float:
    """Pairs per second of ``connections`` threads in PROCESSES processes. ``make`` returns the function of a thread."""
    processes = min(PROCESSES, connections)
    fork = multiprocessing.get_context("fork")
    start, stop = fork.Barrier(connections + 1), fork.Event()
    done = fork.Queue()

    def work(counts: list[int]) -> None:
        pair = make()
        for _ in range(20):
            pair()
        start.wait()
        count = 0
        while not stop.is_set():
            pair()
            count += 1
        counts.append(count)

    def process() -> None:
        counts: list[int] = []
        threads = [threading.Thread(target=work, args=(counts,)) for _ in range(connections // processes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        done.put(sum(counts))

    workers = [fork.Process(target=process, daemon=True) for _ in range(processes)]
    for worker in workers:
        worker.start()
    start.wait(60)
    begun = time.perf_counter()
    time.sleep(PAIR_SECONDS)
    stop.set()
    took = time.perf_counter() - begun
    total = sum(done.get(timeout=60) for _ in workers)
    for worker in workers:
        worker.join()
    return total / took


def ours(user_id: int) -> Callable[[], None]:
    from django.db import transaction

    from credits import ledger

    # Each movement is inside a transaction, as in a run.
    def pair() -> None:
        call = ledger_plain.next_call()
        with transaction.atomic():
            ledger.hold(user_id, ledger_plain.ESTIMATE, invocation_id=call, **HOLD)
        with transaction.atomic():
            captured = ledger.capture(call, ledger_plain.ESTIMATE)
        if captured != ledger_plain.ESTIMATE:
            raise RuntimeError("the capture failed")

    return pair


def theirs(way: ledger_plain.Way, tables: ledger_plain.Plain, url: str) -> Callable[[], None]:
    connection: ledger_plain.Connection = psycopg.connect(url, autocommit=True)
    return lambda: way(tables, connection, ledger_plain.next_call())


def measure_pairs(url: str, user_id: int) -> list[Metric]:
    same, bare = ledger_plain.Plain(user_id), ledger_plain.Plain(user_id, "plain_account", "plain_entry")
    makers: dict[str, Callable[[], Callable[[], None]]] = {"": partial(ours, user_id)}
    makers |= {name: partial(theirs, way, same, url) for name, way in ledger_plain.WAYS.items()}
    makers["bare"] = partial(theirs, ledger_plain.one_statement, bare, url)
    metrics = []
    for connections in CONNECTIONS:
        rates: dict[str, list[float]] = {name: [] for name in makers}
        # In turns, so that a slow moment of the machine affects all of them.
        for _ in range(PAIR_ROUNDS):
            for name, make in makers.items():
                rates[name].append(pairs(connections, make))
        medians = {name: statistics.median(found) for name, found in rates.items()}
        measured, without = medians.pop(""), medians.pop("bare")
        name = f"hold + capture pairs/s, one account, {connections} connections"
        baselines = ", ".join(f"{way} {rate:.0f}/s" for way, rate in medians.items())
        target = "≥ 0.7 of the best" if connections == max(CONNECTIONS) else ""
        metrics.append(Metric(name, f"{measured:.0f}/s", baselines, measured / max(medians.values()), target))
        metrics.append(
            Metric(
                f"the same, beside tables without foreign keys and totals, {connections}",
                f"{measured:.0f}/s",
                f"one statement {without:.0f}/s",
                measured / without,
            )
        )
    return metrics


# --- audit -----------------------------------------------------------------------------------------------------------
def measure_reconcile() -> list[Metric]:
    from credits.reconcile import drift

    own = psutil.Process().memory_info
    steps: list[tuple[str, float]] = []
    before, begun = own().rss, time.perf_counter()
    found = list(drift(lambda step, *_: steps.append((step, time.perf_counter()))))
    end, grown = time.perf_counter(), own().rss - before
    if found:
        raise RuntimeError(f"the ledger does not add up: {found[0]}")
    slowest = max(after - at for (_, at), (_, after) in pairwise([*steps, ("", end)]))
    return [
        Metric(
            f"reconcile_credits over {ledger_data.ROWS:,} rows",
            f"{end - begun:.0f} s",
            f"{len(steps)} steps, the slowest {slowest:.0f} s; {max(0, grown) / 2**20:.0f} MiB more in this process",
        )
    ]


# --- reports ---------------------------------------------------------------------------------------------------------
class Stopwatch:
    """The total time of SQL statements, for Django's ``execute_wrapper``."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, execute: Callable[..., Any], *arguments: Any) -> Any:
        begun = time.perf_counter()
        try:
            return execute(*arguments)
        finally:
            self.seconds += time.perf_counter() - begun


def in_database(call: Callable[[], Any]) -> tuple[float, float]:
    """Medians of the time in the database and of the whole call, in milliseconds."""
    from django.db import connection

    inside, whole = [], []
    call()
    for _ in range(REPORT_ROUNDS):
        watch = Stopwatch()
        with connection.execute_wrapper(watch):
            begun = time.perf_counter()
            call()
            whole.append(time.perf_counter() - begun)
        inside.append(watch.seconds)
    return statistics.median(inside) * 1000, statistics.median(whole) * 1000


def measure_reports(user_id: int, chat_id: str, whose: str) -> list[Metric]:
    from django.db import connection

    from credits import usage

    def metric(name: str, of: str, call: Callable[[], Any], start: Any, target: str) -> Metric:
        def from_rows() -> None:
            with connection.cursor() as cursor:
                parameters = {"user": user_id, "chat": chat_id, "start": start or "-infinity"}
                cursor.execute(FROM_ROWS[name], parameters)
                cursor.fetchall()

        inside, whole = in_database(call)
        plain, _ = in_database(from_rows)
        return Metric(
            f"{name} {of}, {whose}",
            f"{inside:.1f} ms (call {whole:.1f})",
            f"rows alone {plain:.1f} ms",
            inside / plain,
            target,
        )

    metrics = []
    reports = {"summary": usage.summary, "by chat": usage.by_chat, "by day": usage.by_day}
    for name, function in reports.items():
        for period_name in usage.PERIODS:
            period = usage.period_of(period_name)
            target = {"all": "≤ 15 ms", "7d": "≤ 6 ms"}.get(period_name, "") if name != "by day" else ""
            metrics.append(
                metric(name, period_name, lambda f=function, p=period: f(user_id, p), period.start, target)  # type: ignore[misc]
            )
    rows = ledger_data.rows_of_chat(chat_id)
    metrics.append(metric("one chat", f"of {rows:,} rows", lambda: usage.of_chat(user_id, chat_id), None, "≤ 10 ms"))
    return metrics


def main() -> None:
    url = postgres.create_database(os.environ["TEST_DATABASE_URL"])
    directory = tempfile.TemporaryDirectory(prefix="benchmark-")
    os.environ |= {"DATABASE_URL": url, "VAR_DIR": directory.name, "DJANGO_SETTINGS_MODULE": "config.settings"}
    try:
        importlib.import_module("django").setup()
        metrics = measure(url)
    finally:
        from django.db import connections

        connections.close_all()
        postgres.drop_database(url)
        directory.cleanup()
    report("ledger", metrics)


def measure(url: str) -> list[Metric]:
    from django.core.management import call_command
    from django.db import connections

    from credits import usage

    call_command("migrate", verbosity=0)
    user_ids = ledger_data.make_users()
    connections.close_all()
    with psycopg.connect(url, autocommit=True) as sql:
        sql.execute(ledger_plain.COPIES)
        metrics = measure_pairs(url, user_ids[0])
        begun = time.perf_counter()
        ledger_data.fill(sql, user_ids)
    took = time.perf_counter() - begun
    begun = time.perf_counter()
    ledger_data.count(user_ids)
    counted = time.perf_counter() - begun
    metrics.append(Metric(f"{ledger_data.ROWS:,} rows of {len(user_ids):,} users written", f"{took:.0f} s"))
    metrics.append(Metric("their totals counted", f"{counted:.0f} s"))
    heaviest, median = user_ids[0], user_ids[len(user_ids) // 2]
    metrics += measure_reports(heaviest, ledger_data.long_chat(heaviest), "heaviest user")
    newest = usage.by_chat(median, usage.period_of("all"))[0].chat_id
    metrics += measure_reports(median, newest, "median user")
    metrics += measure_reconcile()
    return metrics


if __name__ == "__main__":
    main()
