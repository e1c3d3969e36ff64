"""A part of ``latency``: hundreds of runs at a model that takes seconds, beside the same runs with a model that answers
at once.
"""

import asyncio
import statistics
import threading
import time
from typing import Any

from benchmarks.harness import Metric, side_by_side
from benchmarks.providers import bare, streaming
from benchmarks.runs import CLIENTS, MESSAGE, USERS, Bench

MOST = 500
RUNS, ROUNDS = 1500, 2
# At half the rate, for the overhead of a run over the model's own time.
STEADY_SECONDS = 12.0
POLL_SECONDS = 0.05


def in_flight(bench: Bench, url: str) -> list[Metric]:
    rates: dict[str, list[float]] = {"streaming": [], "demo": []}
    most = []
    for _ in range(ROUNDS):
        for model, measured in rates.items():
            rate, seen = full(bench, model)
            measured.append(rate)
            if model == "streaming":
                most.append(seen)
    rate, without = (statistics.mean(measured) for measured in rates.values())
    count = round(rate / 2 * STEADY_SECONDS)
    took = streaming(bench, rate / 2, count)
    alone = [total for _, total in asyncio.run(bare(url, rate / 2, count))]
    over = statistics.median(took) - statistics.median(alone)
    return [
        Metric(
            f"runs/s with a model of {statistics.median(alone):.1f} s, up to {max(most)} in flight, all complete",
            ", ".join(f"{each:.0f}/s" for each in rates["streaming"]),
            ", ".join(f"{each:.0f}/s" for each in rates["demo"]) + " with a model that answers at once",
            rate / without,
            "≥ 0.8",
        ),
        Metric(
            f"the run's time over the model's own, at half that rate ({rate / 2:.0f} runs/s)",
            f"p50 {over * 1000:.1f} ms",
            f"a bare client's p50 {statistics.median(alone) * 1000:.1f} ms",
            target="p50 ≤ 25 ms",
        ),
    ]


def full(bench: Bench, model: str) -> tuple[float, int]:
    """Runs per second with as many clients as allowed, and the most that were in flight. The rate is that between the
    first run's end and the last run's start, while the machine has all of the work to do. All runs must complete.
    """
    chats = bench.chats(RUNS)
    connections = [[bench.connection(user) for user in range(USERS)] for _ in range(CLIENTS)]
    room = threading.Semaphore(MOST)
    runs: list[str] = []
    most = 0

    def start(client: int, number: int) -> None:
        room.acquire()
        body: dict[str, Any] = {"message": MESSAGE, "model": model}
        path = f"/api/v1/chats/{chats[number]}/runs"
        runs.append(connections[client][number % USERS].json("POST", path, body)["id"])

    posting = threading.Thread(target=side_by_side, args=(CLIENTS, RUNS, start))
    query = "SELECT count(*) FROM runs_run WHERE id = ANY(%s) AND finished_at IS NOT NULL"
    posting.start()
    ended = 0
    while ended < RUNS:
        time.sleep(POLL_SECONDS)
        posted = list(runs)
        now = int(str(bench.one(query, posted)))
        most = max(most, len(posted) - now)
        room.release(now - ended) if now > ended else None
        ended = now
    posting.join()
    query = """
        SELECT count(*) FILTER (WHERE finished_at < last) / extract(epoch FROM last - first),
            count(*) FILTER (WHERE status = 'completed')
        FROM runs_run, (
            SELECT min(finished_at) AS first, max(created_at) AS last FROM runs_run WHERE id = ANY(%(runs)s)
        ) span
        WHERE id = ANY(%(runs)s) GROUP BY first, last
    """
    row = bench.sql.execute(query, {"runs": runs}).fetchone()
    assert row is not None
    rate, completed = row
    assert completed == RUNS, f"{completed} of {RUNS} runs completed"
    return float(rate), most
