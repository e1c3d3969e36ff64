"""Runs with a model behind HTTP, on PostgreSQL and Redis: what a run takes over the model's own time, and the rate of
runs while a fifth of the requests to the model fail.

``make bench``, or ``python -m tests.stack.run_services python -m benchmarks providers``.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import aiohttp

from benchmarks.harness import Metric, milliseconds, percentile, report
from benchmarks.runs import Bench
from tests.faults.providers import CountingProvider, counting, rows
from tests.stack.stack import Stack

# The streaming model takes 1.5 s: it sends more than its 20 chunks.
WISH = "chunks=20&ms=63"
RUNS_PER_SECOND, RUNS = 20, 400
WARM_RUNS, FAULT_RUNS, ROUNDS = 400, 1000, 3
FAILING = 0.2
MOST = 0.99
STREAMING = """
from runs.models import AgentModel, Provider
provider = Provider.objects.create(name="streaming", kind="openai", base_url="{url}/v1")
AgentModel.objects.create(
    name="streaming", display_name="Streaming", provider=provider, provider_model="{wish}", price_in=500_000,
    price_out=1_500_000, max_output_tokens=1000,
)
"""


@contextmanager
def model_server() -> Any:
    command = [sys.executable, "-m", "tests.llm.model_server"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.kill()


async def bare(url: str, rate: float, count: int) -> list[tuple[float, float]]:
    """The seconds of the same requests by a bare client, at the same rate, to the first text and to the end. Without
    ``stream_options`` the answer would be shorter.
    """
    options = {"stream": True, "stream_options": {"include_usage": True}}
    body = json.dumps({"model": WISH, "messages": [{"role": "user", "content": "Hello"}]} | options)
    headers = {"Content-Type": "application/json"}

    async def ask() -> tuple[float, float]:
        begun, first = time.perf_counter(), 0.0
        async with session.post(f"{url}/v1/chat/completions", data=body, headers=headers) as response:
            async for chunk in response.content.iter_any():
                if not first and b'"content": "word' in chunk:
                    first = time.perf_counter() - begun
        return first, time.perf_counter() - begun

    # Without aiohttp's limit of 100 connections, for which requests would wait.
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, trust_env=False) as session:
        asked = []
        for _ in range(count):
            asked.append(asyncio.create_task(ask()))
            await asyncio.sleep(1 / rate)
        return await asyncio.gather(*asked)


def streaming(bench: Bench, rate: float, count: int) -> list[float]:
    """The seconds of runs from before the POST to their end."""
    chats = bench.chats(count)
    posted: dict[str, float] = {}

    def start(number: int) -> None:
        at = time.time()
        body = {"message": "Hello", "model": "streaming"}
        run = bench.connection(number).json("POST", f"/api/v1/chats/{chats[number]}/runs", body)
        posted[run["id"]] = at

    begun = time.perf_counter()
    with ThreadPoolExecutor(8) as pool:
        for number in range(count):
            time.sleep(max(0.0, begun + number / rate - time.perf_counter()))
            pool.submit(start, number)
    query = "SELECT id, status, extract(epoch FROM finished_at) FROM runs_run WHERE id = ANY(%s)"
    while True:
        ended = bench.sql.execute(query, (list(posted),)).fetchall()
        if len(ended) == count and all(finished for _, _, finished in ended):
            break
        time.sleep(0.2)
    assert {status for _, status, _ in ended} == {"completed"}
    return [float(finished) - posted[run] for run, _, finished in ended]


def faults(bench: Bench, provider: CountingProvider) -> list[Metric]:
    """Runs per second without and with faults, by turns. All runs must complete.

    The rate is that of the first 99 % of the runs to end, and beside it that of all. A few runs fail three or more
    times in a row and wait for seconds, as the backoff says, while the workers have nothing left to do.
    """
    rates: dict[float, list[tuple[float, float]]] = {0.0: [], FAILING: []}
    for _ in range(ROUNDS):
        for failing in rates:
            provider.failing = failing
            bench.throughput(FAULT_RUNS)
            query = """
                SELECT extract(epoch FROM finished_at - min(created_at) OVER ())
                FROM (SELECT created_at, finished_at FROM runs_run ORDER BY created_at DESC LIMIT %s) run ORDER BY 1
            """
            ends = [float(end) for (end,) in bench.sql.execute(query, [FAULT_RUNS]).fetchall()]
            most = round(FAULT_RUNS * MOST)
            rates[failing].append((most / ends[most - 1], FAULT_RUNS / ends[-1]))
    without, with_faults = (
        ", ".join(f"{most:.0f} (all: {all_of_them:.0f})" for most, all_of_them in found) for found in rates.values()
    )
    ratio = sum(most for most, _ in rates[FAILING]) / sum(most for most, _ in rates[0.0])
    name = f"{FAULT_RUNS} runs, {FAILING:.0%} of the requests fail ({provider.failures} did), all complete"
    return [Metric(name, f"{with_faults} runs/s", f"{without} runs/s without faults", ratio, "≥ 0.7")]


def main() -> None:
    services = {"database_url": os.environ["TEST_DATABASE_URL"], "redis_url": os.environ["TEST_REDIS_URL"]}
    # With five attempts, one of 3,000 runs would fail.
    settings = {"RUN_USER_LIMIT": "0", "SIGNUP_CREDITS": "1000000", "WEB_WORKERS": "1", "MODEL_ATTEMPTS": "10"}
    with model_server() as url, counting(0.05) as provider:
        prepare = rows(provider, default=True) + STREAMING.format(url=url, wish=WISH)
        with Stack(**services, run_workers=2, environment=settings, prepare=prepare) as stack:
            bench = Bench(stack)
            bench.throughput(WARM_RUNS)
            took = streaming(bench, RUNS_PER_SECOND, RUNS)
            alone = [total for _, total in asyncio.run(bare(url, RUNS_PER_SECOND, RUNS))]
            over = [percentile(took, share) - percentile(alone, share) for share in (0.5, 0.99)]
            metrics = [
                Metric(
                    f"a run of 20 chunks in 1.5 s, at {RUNS_PER_SECOND} runs/s: over the model's own time",
                    f"p50 {over[0] * 1000:.1f} ms, p99 {over[1] * 1000:.1f} ms",
                    f"a bare client's {milliseconds(alone)}",
                    target="≤ 20 ms",
                ),
                *faults(bench, provider),
            ]
    report("Runs with a model behind HTTP", metrics)


if __name__ == "__main__":
    main()
