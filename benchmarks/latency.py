"""What a client waits for while runs start at a steady rate, on PostgreSQL and Redis: the first text of an answer, a
run after the answer to its question or a tool's callback, a cancel, a webhook; and runs per second while hundreds wait
for a slow model.

``make bench``, or ``python -m tests.stack.run_services python -m benchmarks.latency --rate 20 --seconds 15``.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack
from datetime import datetime
from typing import Any

import aiohttp

from benchmarks.harness import Metric, milliseconds, report
from benchmarks.in_flight import in_flight
from benchmarks.providers import STREAMING, WISH, bare, model_server
from benchmarks.runs import MESSAGE, USERS, Bench
from tests.stack.process import free_port, python
from tests.stack.stack import Stack
from tests.webhooks.receiver import Receiver, answer, receiving

RATE, SECONDS = 20.0, 15.0
WARM_RUNS = 400
PARTS = ("first delta", "respond", "cancel", "callback", "webhooks", "in flight")
# Its server says that the outcome comes by a callback.
TOOL = """
from runs.models import Tool
Tool.objects.create(
    name="film", display_name="film", description="film", node_type="http", price=1, url="{url}", park_seconds=3600
)
"""
EVENTS_A_RUN = 2  # agent.started, agent.completed
SETTLE_SECONDS = 60.0


class Client:
    """An open loop: its calls begin by the clock, also while earlier ones are slow."""

    def __init__(self, bench: Bench, session: aiohttp.ClientSession, rate: float, count: int, films: Receiver) -> None:
        self.bench, self.session, self.rate, self.count, self.films = bench, session, rate, count, films
        self.url = f"http://127.0.0.1:{bench.stack.port}/api/v1"
        self.chats = bench.chats(count)
        self.waitpoints: dict[str, str] = {}
        # When ``reactions`` made its request about a run.
        self.asked: dict[str, float] = {}

    def headers(self, number: int) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.bench.tokens[number % USERS]}"}

    async def at_rate(self, call: Callable[[int], Awaitable[Any]]) -> list[Any]:
        begun, calls = time.perf_counter(), []
        for number in range(self.count):
            await asyncio.sleep(max(0.0, begun + number / self.rate - time.perf_counter()))
            calls.append(asyncio.ensure_future(call(number)))
        return await asyncio.gather(*calls)

    async def post(self, number: int, path: str, body: Any = None) -> Any:
        async with self.session.post(self.url + path, json=body, headers=self.headers(number)) as answer:
            assert answer.status < 300, await answer.text()
            return await answer.json()

    async def start(self, number: int, message: str, **options: Any) -> str:
        path = f"/chats/{self.chats[number]}/runs"
        return str((await self.post(number, path, {"message": message} | options))["id"])

    async def events(self, number: int, run: str) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """The events of the run's stream, to its end."""
        kind = ""
        async with self.session.get(f"{self.url}/runs/{run}/stream", headers=self.headers(number)) as answer:
            assert answer.status == 200, answer.status
            async for line in answer.content:
                if line.startswith(b"event: "):
                    kind = line[7:].strip().decode()
                elif line.startswith(b"data: "):
                    yield kind, json.loads(line[6:])

    async def first_deltas(self) -> list[float]:
        """The seconds from before the POST to the first text at the client, which opens the stream after the POST and
        reads it to its end.
        """

        async def one(number: int) -> float:
            begun, first = time.time(), 0.0
            run = await self.start(number, "Hello", model="streaming")
            async for kind, _ in self.events(number, run):
                if kind == "message.delta" and not first:
                    first = time.time()
            assert first
            return first - begun

        return await self.at_rate(one)

    async def reactions(
        self, message: str, before: str, after: str, react: Callable[[int, str], Awaitable[None]]
    ) -> tuple[list[float], list[float]]:
        """Runs are brought to the status or event ``before``, with a stream open for each; then ``react`` is called for
        one after the other. The seconds from before that request until ``after`` is seen in the stream, and until the
        time that the service states in this event, if it states one.
        """
        runs = [await self.start(number, message) for number in range(self.count)]
        ready = asyncio.Semaphore(0)

        async def follow(number: int) -> tuple[float, float]:
            found = None
            async for kind, data in self.events(number, runs[number]):
                if kind == "waitpoint.opened":
                    self.waitpoints[runs[number]] = data["id"]
                state = data["status"] if kind == "run.status" else kind
                asked, now = self.asked.get(runs[number]), time.time()
                if asked is not None and state == after and found is None:
                    stated = datetime.fromisoformat(data["at"]).timestamp() if "at" in data else now
                    found = now - asked, stated - asked
                elif state == before:
                    ready.release()
            assert found is not None
            return found

        followers = [asyncio.create_task(follow(number)) for number in range(self.count)]
        async with asyncio.timeout(SETTLE_SECONDS):
            for _ in runs:
                await ready.acquire()

        async def one(number: int) -> None:
            self.asked[runs[number]] = time.time()
            await react(number, runs[number])

        await self.at_rate(one)
        async with asyncio.timeout(SETTLE_SECONDS):
            found = await asyncio.gather(*followers)
        return [seen for seen, _ in found], [stated for _, stated in found]

    async def responses(self) -> tuple[list[float], list[float]]:
        async def respond(number: int, run: str) -> None:
            answer = {"kind": "CLARIFICATION", "answer": "blue"}
            await self.post(number, f"/waitpoints/{self.waitpoints[run]}/respond", answer)

        return await self.reactions("/ask Which?\n/say {result}", "waiting", "running", respond)

    async def cancels(self) -> tuple[list[float], list[float]]:
        async def cancel(number: int, run: str) -> None:
            await self.post(number, f"/runs/{run}/cancel")

        return await self.reactions("/wait 120\n/say done", "running", "cancelled", cancel)

    async def callbacks(self) -> tuple[list[float], list[float]]:
        """Until the first text of the next answer is seen, and until the model was asked for it."""
        urls: dict[str, str] = {}

        async def call_back(number: int, run: str) -> None:
            if not urls:
                calls = [json.loads(request.body) for request in self.films.requests]
                urls.update((call["runId"], call["callback"]["url"]) for call in calls)
            self.asked[run] = time.time()
            async with self.session.post(urls[run], json={"result": "a film"}) as answer:
                assert (await answer.json())["accepted"]

        seen, _ = await self.reactions("/call film {}\n/say {result}", "tool.parked", "message.delta", call_back)
        asked = self.bench.sql.execute("SELECT run_id, extract(epoch FROM started_at) FROM runs_turn WHERE index = 2")
        return seen, [float(at) - self.asked[run] for run, at in asked if run in self.asked]

    async def webhooks(self) -> list[float]:
        """The seconds from the time at which a delivery was recorded until its receiver has the request."""
        port = free_port()
        receiver = self.bench.stack.add("receiver", python("-m", "benchmarks.receiver", str(port)))
        assert receiver is not None
        for user in range(USERS):
            await self.post(user, "/webhooks", {"url": f"http://127.0.0.1:{port}/timed"})

        async def received(runs: int) -> dict[str, str]:
            async with asyncio.timeout(SETTLE_SECONDS):
                while receiver.log.read_text().count("\n") < runs * EVENTS_A_RUN:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)  # the receiver is a process
            return dict(reversed(line.split()) for line in receiver.log.read_text().splitlines())

        # The first delivery of a process loads what it needs.
        await self.start(0, MESSAGE)
        first = await received(1)
        await self.at_rate(lambda number: self.start(number, MESSAGE))
        found = await received(1 + self.count)
        query = "SELECT event_id, extract(epoch FROM created_at) FROM webhooks_delivery"
        recorded = dict(self.bench.sql.execute(query).fetchall())
        return [float(found[event]) - float(recorded[event]) for event in found if event not in first]


async def measure(
    bench: Bench, url: str, films: Receiver, parts: Sequence[str], rate: float, seconds: float
) -> list[Metric]:
    count, found = round(rate * seconds), []
    async with aiohttp.ClientSession(
        trust_env=False, connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
    ) as session:

        def client() -> Client:
            return Client(bench, session, rate, count, films)

        if "first delta" in parts:
            alone = [first for first, _ in await bare(url, rate, count)]
            model = statistics.median(alone)
            took = [each - model for each in await client().first_deltas()]
            name = f"POST to the first text at the client, {rate:g} runs/s: over the model's own time"
            found.append(
                Metric(name, milliseconds(took), f"a bare client's {milliseconds(alone)}", target="p99 ≤ 60 ms")
            )
        for part, name, target, call in (
            ("respond", "answer of a waiting run to running", "p99 ≤ 50 ms", Client.responses),
            ("cancel", "cancel of an executing run to cancelled", "p50 ≤ 250 ms, p99 ≤ 1 s", Client.cancels),
        ):
            if part in parts:
                seen, stated = await call(client())
                name = f"{name}, {rate:g}/s of {count} runs: event at the client"
                found.append(Metric(name, milliseconds(seen), f"{milliseconds(stated)} in the database", target=target))
        if "callback" in parts:
            seen, stated = await client().callbacks()
            name = f"callback of a parked call to the next request to the model, {rate:g}/s of {count} runs"
            text = f"{milliseconds(seen)} to its first text at the client"
            found.append(Metric(name, milliseconds(stated), text, target="p99 ≤ 60 ms"))
        if "webhooks" in parts:
            lag = await client().webhooks()
            found.append(Metric(f"webhook, recorded to received, {rate:g} runs/s", milliseconds(lag)))
    return found


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.latency", description=__doc__)
    parser.add_argument("--rate", type=float, default=RATE, help=f"runs per second (default {RATE:g})")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"length of each part (default {SECONDS:g})")
    parser.add_argument("--only", choices=PARTS, action="append", help="this part only; can be repeated")
    given = parser.parse_args(arguments)
    parts = given.only or PARTS
    services = {"database_url": os.environ["TEST_DATABASE_URL"], "redis_url": os.environ["TEST_REDIS_URL"]}
    settings = {"RUN_USER_LIMIT": "0", "SIGNUP_CREDITS": "1000000", "STREAMS_PER_USER": "1000"}
    with ExitStack() as running:
        url, films = running.enter_context(model_server()), running.enter_context(receiving(answer(202)))
        prepare = STREAMING.format(url=url, wish=WISH) + TOOL.format(url=films.url)
        stack = running.enter_context(Stack(**services, run_workers=2, environment=settings, prepare=prepare))
        bench = Bench(stack)
        bench.throughput(WARM_RUNS)
        metrics = asyncio.run(measure(bench, url, films, parts, given.rate, given.seconds))
        if "in flight" in parts:
            metrics += in_flight(bench, url)
    report("Latency at a steady rate", metrics)


if __name__ == "__main__":
    main(sys.argv[1:])
