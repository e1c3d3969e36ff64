"""CPU of a model turn of 60 chunks with a tool call, for each kind of provider: beside a bare aiohttp loop that reads
the same bytes, and beside the providers' SDKs. Then the time and memory of the imports.

The model server is another process. Each chunk arrives by itself, as from a model.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

from benchmarks.harness import Metric, report

KINDS = ("openai", "openai_responses", "anthropic")
# Turns at the same time, and turns in all.
STREAMS = {1: 20, 64: 192, 512: 1024}
WISH = 'chunks=60&ms=3&call=calculate&args={"expression": "6 * 7"}'
TARGET = 3.0

Turn = Callable[[], Awaitable[Any]]


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings")
    command = [sys.executable, "-m", "tests.llm.model_server"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        try:
            measured = {kind: _child("turns", url, kind) for kind in KINDS}
        finally:
            server.kill()
    metrics = [metric for kind, values in measured.items() for metric in _metrics(kind, values)]
    report("CPU of a model turn", metrics)
    ours, sdks = _child("imports", "adapters"), _child("imports", "adapters", "sdks")
    values = [("seconds", "s of CPU", 3), ("megabytes", "MiB", 0)]
    report(
        "Imports: the adapters, beside both SDKs as well",
        [
            Metric(name, f"{ours[name]:.{digits}f} {unit}", f"{sdks[name]:.{digits}f} {unit}", ours[name] / sdks[name])
            for name, unit, digits in values
        ],
    )


def _metrics(kind: str, values: dict[str, dict[str, float]]) -> list[Metric]:
    metrics = []
    for streams, took in values.items():
        bare = took["bare"]
        for name in ("adapter", "SDK"):
            metrics.append(
                Metric(
                    f"{kind}, {streams} streams, {name}",
                    f"{took[name] * 1000:.2f} ms",
                    f"{bare * 1000:.2f} ms",
                    took[name] / bare,
                    f"≤ {TARGET}" if name == "adapter" else "",
                )
            )
    return metrics


def _child(*arguments: str) -> Any:
    output = subprocess.run([sys.executable, "-m", "benchmarks.models", *arguments], check=True, stdout=subprocess.PIPE)
    return json.loads(output.stdout.splitlines()[-1])


# --- in a child process ----------------------------------------------------------------------------------------------


def measure_turns(url: str, kind: str) -> None:
    """Print the CPU seconds of a turn: ``{streams: {bare, adapter, SDK}}``."""
    import django

    django.setup()

    async def all_streams() -> dict[int, dict[str, float]]:
        turns = {"bare": bare(url, kind), "adapter": adapter(url, kind), "SDK": sdk(url, kind)}
        for turn in turns.values():
            await _seconds(turn, 4, 8)
        return {
            streams: {name: await _seconds(turn, streams, count) for name, turn in turns.items()}
            for streams, count in STREAMS.items()
        }

    print(json.dumps(asyncio.run(all_streams())))


async def _seconds(turn: Turn, streams: int, count: int) -> float:
    """The CPU seconds of each of ``count`` turns, ``streams`` of them at a time."""
    left = iter(range(count))

    async def work() -> None:
        for _ in left:
            await turn()

    begun = time.process_time()
    await asyncio.gather(*(work() for _ in range(streams)))
    return (time.process_time() - begun) / count


def _request(url: str, kind: str) -> Any:
    from tests.llm.helpers import CALCULATE, at, model_of, request_of

    model = model_of(at(url, kind), WISH)
    return request_of("What is 6 * 7?", model=model, tools=(CALCULATE,), instructions="You are a helpful assistant.")


def bare(url: str, kind: str) -> Turn:
    import aiohttp

    from config.kernel.jsontext import to_text
    from tests.llm.helpers import client_of

    request = _request(url, kind)
    client = client_of(request.model.server)
    body = to_text(client.body(request)).encode()
    sessions: list[aiohttp.ClientSession] = []

    async def turn() -> None:
        if not sessions:
            sessions.append(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), trust_env=False))
        async with sessions[0].post(client.url, data=body, headers=client.headers) as response:
            async for _ in response.content.iter_any():
                pass

    return turn


def adapter(url: str, kind: str) -> Turn:
    from runs.llm.registry import client_for

    request = _request(url, kind)

    async def turn() -> None:
        calls = 0
        async with aclosing(client_for(request.model.server).stream(request)) as events:
            async for event in events:
                calls += hasattr(event, "arguments")
        assert calls == 1

    return turn


def sdk(url: str, kind: str) -> Turn:
    import anthropic
    import httpx
    import openai

    from tests.llm.helpers import client_of

    request = _request(url, kind)
    body = client_of(request.model.server).body(request)
    pool = {"limits": httpx.Limits(max_connections=None), "trust_env": False}
    if kind == "anthropic":
        messages = anthropic.AsyncAnthropic(
            api_key="x", base_url=url, max_retries=0, timeout=600, http_client=anthropic.DefaultAsyncHttpxClient(**pool)
        )
        create: Any = messages.messages.create
    else:
        client = openai.AsyncOpenAI(
            api_key="x",
            base_url=f"{url}/v1",
            max_retries=0,
            timeout=600,
            http_client=openai.DefaultAsyncHttpxClient(**pool),
        )
        create = client.chat.completions.create if kind == "openai" else client.responses.create

    async def turn() -> None:
        async with await create(**body) as stream:
            async for _ in stream:
                pass

    return turn


def measure_imports(*names: str) -> None:
    """Print the CPU seconds and the memory of the import of the adapters, and of the SDKs if they are named."""
    import django
    import psutil

    django.setup()
    begun = time.process_time()
    from runs.llm.registry import preload

    preload()
    if "sdks" in names:
        import anthropic
        import openai

        openai.AsyncOpenAI(api_key="x").chat.completions  # noqa: B018  (the SDK imports its types at the first use)
        openai.AsyncOpenAI(api_key="x").responses  # noqa: B018
        anthropic.AsyncAnthropic(api_key="x").messages  # noqa: B018
    seconds = time.process_time() - begun
    print(json.dumps({"seconds": seconds, "megabytes": psutil.Process().memory_info().rss / 2**20}))


if __name__ == "__main__":
    {"turns": measure_turns, "imports": measure_imports}[sys.argv[1]](*sys.argv[2:])
