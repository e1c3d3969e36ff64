"""A model behind HTTP for ``latency``: its server, runs that use it, and a bare client beside them."""

import asyncio
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import aiohttp

from benchmarks.runs import Bench

# The streaming model takes 1.5 s: it sends more than its 20 chunks.
WISH = "chunks=20&ms=63"
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
