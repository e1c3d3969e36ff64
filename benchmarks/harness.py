"""Shared functions of the benchmarks: percentiles, CPU of processes, concurrent HTTP clients, tables and JSON.

The speed of a machine varies. Therefore the result is the ratio to a baseline that is measured in the same run.
"""

from __future__ import annotations

import http.client
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import psutil


@dataclass
class Metric:
    """One line of a table. ``target`` is the required value as text."""

    name: str
    value: str
    baseline: str = ""
    ratio: float | None = None
    target: str = ""


def percentile(values: Iterable[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def milliseconds(values: list[float]) -> str:
    return f"p50 {statistics.median(values) * 1000:.1f} ms, p99 {percentile(values, 0.99) * 1000:.1f} ms"


def cpu_seconds(pids: Iterable[int]) -> float:
    """User and system time of the processes and their children, in seconds."""
    total = 0.0
    for pid in pids:
        for process in family(pid):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def family(pid: int) -> list[psutil.Process]:
    parent = psutil.Process(pid)
    return [parent, *parent.children(recursive=True)]


def rss(pid: int) -> int:
    """Resident memory of the process and its children, in bytes."""
    return sum(process.memory_info().rss for process in family(pid))


class Connection:
    """A kept-alive HTTP connection with a bearer token. It uses little CPU, so that the server is measured."""

    def __init__(self, port: int, token: str = "") -> None:
        self.http = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self.headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}

    def request(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        self.http.request(method, path, None if body is None else json.dumps(body), self.headers)
        answer = self.http.getresponse()
        return answer.status, answer.read()

    def json(self, method: str, path: str, body: Any = None) -> Any:
        status, content = self.request(method, path, body)
        if status >= 300:
            raise RuntimeError(f"{method} {path}: {status} {content[:500]!r}")
        return json.loads(content)


def side_by_side(clients: int, count: int, call: Callable[[int, int], None]) -> list[float]:
    """Call ``call(client, number)`` ``count`` times on ``clients`` threads. Returns the seconds of each call."""
    took: list[float] = []
    numbers = iter(range(count))
    lock = threading.Lock()
    failures: list[BaseException] = []

    def work(client: int) -> None:
        while not failures:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            begun = time.perf_counter()
            try:
                call(client, number)
            except BaseException as error:
                failures.append(error)
                return
            took.append(time.perf_counter() - begun)

    threads = [threading.Thread(target=work, args=(client,)) for client in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return took


def wait_until(predicate: Callable[[], bool], timeout: float, every: float = 0.02) -> None:
    end = time.monotonic() + timeout
    while not predicate():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {timeout} s")
        time.sleep(every)


def report(title: str, metrics: list[Metric]) -> None:
    """Print a table and then one line of JSON."""
    rows = [("metric", "measured", "baseline in the same run", "ratio", "target")]
    rows += [(f.name, f.value, f.baseline, "" if f.ratio is None else f"{f.ratio:.2f}", f.target) for f in metrics]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    print(f"\n{title}\n")
    for index, row in enumerate(rows):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")
        if index == 0:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|")
    print()
    print(json.dumps({"benchmark": title, "metrics": [asdict(metric) for metric in metrics]}))
    sys.stdout.flush()
