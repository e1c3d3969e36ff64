"""The streamed text of many runs, appended by one statement and, by turns, in steps (docs/decisions/0035).

``make bench``, or ``python -m tests.stack.run_services python -m benchmarks text``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.harness import Metric, django_database, report

RUNS = (1, 10, 30)
ROUNDS, CALLS = 10, 40


def running(count: int) -> list[Any]:
    from config.kernel import clock
    from tests import factories

    since = clock.now()
    given = {"status": "running", "worker_id": "wrk_a", "lease_token": 1, "running_since": since}
    return [factories.RunFactory(**given) for _ in range(count)]


def measure() -> list[Metric]:
    from django.core.management import call_command

    from runs.lifecycle import text

    call_command("migrate", verbosity=0)
    ways: dict[str, Callable[..., dict[str, Any]]] = {"once": text.append_text, "steps": text._append_in_steps}
    metrics = []
    for count in RUNS:
        runs = running(count)
        cpu: dict[str, list[float]] = {way: [] for way in ways}
        took: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(ROUNDS + 1):
            for way, append in ways.items():
                begun, busy = time.perf_counter(), time.process_time()
                for _ in range(CALLS):
                    written = append([(run, "a few words ") for run in runs])
                    runs = [written[run.pk] for run in runs]
                if number:  # the first round plans statements
                    cpu[way].append((time.process_time() - busy) / CALLS * 1000)
                    took[way].append((time.perf_counter() - begun) / CALLS * 1000)
        for name, measured in (("CPU of the process", cpu), ("duration", took)):
            once, steps = (statistics.median(measured[way]) for way in ("once", "steps"))
            label = f"text of {count} run{'s' * (count > 1)}, {name}"
            metrics.append(Metric(label, f"{once:.2f} ms", f"{steps:.2f} ms in steps", once / steps))
    return metrics


def main() -> None:
    with django_database():
        metrics = measure()
    report("Streamed text", metrics)


if __name__ == "__main__":
    main()
