"""Shared functions of the benchmarks: percentiles, CPU of processes, concurrent HTTP clients, tables and JSON.

The speed of a machine varies. Therefore the result is the ratio to a baseline that is measured in the same run.
"""

import contextlib
import http.client
import importlib
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from tests.stack import postgres


@contextlib.contextmanager
def django_database() -> Iterator[None]:
    """Django in this process, on a new database of the server in TEST_DATABASE_URL."""
    url = postgres.create_database(os.environ["TEST_DATABASE_URL"])
    with tempfile.TemporaryDirectory(prefix="benchmark-") as directory:
        os.environ |= {"DATABASE_URL": url, "VAR_DIR": directory, "DJANGO_SETTINGS_MODULE": "config.settings"}
        os.environ["REDIS_URL"] = os.environ["TEST_REDIS_URL"]
        try:
            importlib.import_module("django").setup()
            yield
        finally:
            from django.db import connections

            connections.close_all()
            postgres.drop_database(url)


@dataclass
class Metric:
    """One line of a table. ``target`` is the required value as text.

    ``better`` is "lower" or "higher" for a ratio that ``make bench-check`` guards.
    """

    name: str
    value: str
    baseline: str = ""
    ratio: float | None = None
    target: str = ""
    better: str = ""


def percentile(values: Iterable[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def milliseconds(values: list[float]) -> str:
    return f"p50 {statistics.median(values) * 1000:.1f} ms, p99 {percentile(values, 0.99) * 1000:.1f} ms"


def ratio_by_rounds(measured: Sequence[float], baseline: Sequence[float]) -> float:
    """The median of the ratios of the rounds, because the machine's speed varies between the rounds."""
    return statistics.median(mine / its for mine, its in zip(measured, baseline, strict=True))


def cpu_seconds(pids: Iterable[int]) -> float:
    """User and system time of the processes and their children, in seconds, also of children that have ended."""
    total = 0.0
    for pid in pids:
        for process in family(pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
    return total


def family(pid: int) -> list[psutil.Process]:
    parent = psutil.Process(pid)
    return [parent, *parent.children(recursive=True)]


def rss(pid: int) -> int:
    """Resident memory of the process and its children, in bytes."""
    return sum(process.memory_info().rss for process in family(pid))


def memory(pid: int) -> int:
    """Memory of the process and its children, in bytes. Shared pages count once where the system says so."""
    total = 0
    for process in family(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            info = process.memory_full_info()
            total += getattr(info, "pss", info.uss)
    return total


class Connection:
    """A kept-alive HTTP connection with a bearer token. It uses little CPU, so that the server is measured.

    A call with a ``token`` of its own is made with that token.
    """

    def __init__(self, port: int, token: str = "") -> None:
        self.http = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self.headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}

    def request(self, method: str, path: str, body: Any = None, token: str = "") -> tuple[int, bytes]:
        headers = self.headers | {"Authorization": f"Bearer {token}"} if token else self.headers
        self.http.request(method, path, None if body is None else json.dumps(body), headers)
        answer = self.http.getresponse()
        return answer.status, answer.read()

    def json(self, method: str, path: str, body: Any = None, token: str = "") -> Any:
        status, content = self.request(method, path, body, token)
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


def table(metrics: list[Metric]) -> str:
    """The metrics in Markdown."""
    rows = [("metric", "measured", "baseline in the same run", "ratio", "target")]
    rows += [(f.name, f.value, f.baseline, "" if f.ratio is None else f"{f.ratio:.2f}", f.target) for f in metrics]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def document(title: str, metrics: list[Metric]) -> dict[str, Any]:
    """The metrics as a JSON object."""
    return {"benchmark": title, "metrics": [asdict(metric) for metric in metrics]}


def report(title: str, metrics: list[Metric]) -> None:
    """Print a table and then one line of JSON."""
    print(f"\n{title}\n\n{table(metrics)}\n\n{json.dumps(document(title, metrics))}", flush=True)
