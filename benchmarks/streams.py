"""Open streams on one process, on PostgreSQL and Redis: memory, start, delta latency, effect on web requests.

``make bench``, or ``python -m tests.stack.run_services python -m benchmarks streams``.
"""

import asyncio
import json
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import psycopg
import redis

from benchmarks.harness import Connection, Metric, cpu_seconds, milliseconds, report, rss
from tests.stack.process import Process, free_port, python, wait_for
from tests.stack.stack import Stack, is_ready

STREAMS = 500
USERS = 10
SECONDS = 10
TICK = 0.05  # STREAM_FLUSH_SECONDS
RUNS_A_TICK = 10
READS = 300


class Client:
    """Reads many streams with little CPU, so that the server is measured."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.latencies: list[float] = []
        self.starts: list[float] = []
        self.writers: list[asyncio.StreamWriter] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def open(self, run_id: str, token: str) -> None:
        begun = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = f"GET /api/v1/runs/{run_id}/stream HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {token}\r\n\r\n"
        writer.write(head.encode())
        status = await reader.readline()
        assert b" 200 " in status, status
        await reader.readuntil(b"id: 1\n")
        self.starts.append(time.perf_counter() - begun)
        self.writers.append(writer)
        self.tasks.append(asyncio.create_task(self.listen(reader)))

    async def listen(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            if line.startswith(b'data: {"text":"'):
                self.latencies.append(time.time() - float(json.loads(line[6:])["text"]))

    def close(self) -> None:
        for task, writer in zip(self.tasks, self.writers, strict=True):
            task.cancel()
            writer.close()


class Writer:
    """Writes deltas like a worker: many runs in one transaction, and then one message."""

    def __init__(self, stack: Stack) -> None:
        self.sql = psycopg.connect(stack.environment["DATABASE_URL"])
        self.redis = redis.Redis.from_url(stack.environment["REDIS_URL"])
        self.channel = f"run-events:{stack.environment['REDIS_URL'].rpartition('/')[2]}"

    def write(self, run_ids: list[str]) -> None:
        with self.sql.transaction():
            for run_id in run_ids:
                row = self.sql.execute(
                    "UPDATE runs_run SET last_stream_index = last_stream_index + 1 WHERE id = %s"
                    " RETURNING last_stream_index",
                    (run_id,),
                ).fetchone()
                assert row is not None
                # The time before the commit, so that the latency includes the commit.
                self.sql.execute(
                    "INSERT INTO runs_runevent (run_id, index, type, data, final)"
                    " VALUES (%s, %s, 'message.delta', %s, false)",
                    (run_id, row[0], json.dumps({"text": str(time.time())}, separators=(",", ":"))),
                )
        self.redis.publish(self.channel, " ".join(run_ids))


def start_server(stack: Stack, name: str) -> tuple[Process, int]:
    """A stream process as in the Procfile, and its port."""
    port = free_port()
    stack.process_environment[name] = {"PORT": str(port), "WEB_THREADS": "4"}
    server = stack.add(name, python("-m", "config.serve", "--host", "127.0.0.1", "--workers", "1"))
    assert server is not None
    wait_for(lambda: is_ready(f"http://127.0.0.1:{port}"), 60)
    return server, port


def measure(stack: Stack) -> list[Metric]:
    server, port = start_server(stack, "stream")
    users = [stack.session(f"user{number}") for number in range(USERS)]

    def wait_in_a_chat(number: int) -> tuple[str, str]:
        user = users[number % USERS]
        chat = user.post("/chats").json()["id"]
        run = user.post(f"/chats/{chat}/runs", {"message": "/ask Anyone?"}, timeout=60).json()
        return run["id"], user.credential

    with ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(wait_in_a_chat, range(STREAMS)))
    for run_id, token in runs:
        http = Connection(stack.port, token)
        wait_for(lambda http=http, run_id=run_id: http.json("GET", f"/api/v1/runs/{run_id}")["status"] == "waiting", 60)
        http.http.close()
    return asyncio.run(listen(stack, port, runs, server.pid))


async def listen(stack: Stack, port: int, runs: list[tuple[str, str]], pid: int) -> list[Metric]:
    warm = Client(port)
    for run_id, token in runs[:20]:
        await warm.open(run_id, token)
    warm.close()
    await asyncio.sleep(0.5)
    writer = Writer(stack)
    # The same reads and writes without streams, as a baseline.
    alone = await asyncio.to_thread(read_runs, stack, runs)
    _, before = await write(stack, writer, runs)
    memory = rss(pid)
    client = Client(port)
    for run_id, token in runs:
        await client.open(run_id, token)
    each = (rss(pid) - memory) / STREAMS
    await asyncio.sleep(1)  # receive the earlier events
    client.latencies.clear()
    beside = await asyncio.to_thread(read_runs, stack, runs)
    cpu = cpu_seconds([pid])
    sent, during = await write(stack, writer, runs)
    await asyncio.sleep(1)
    cpu = cpu_seconds([pid]) - cpu
    assert len(client.latencies) == sent, f"{len(client.latencies)} of {sent} deltas arrived"
    latencies = client.latencies
    client.close()
    # The same number of streams of one run.
    crowd = Client(port)
    for _ in range(STREAMS):
        await crowd.open(*runs[0])
    await asyncio.sleep(1)  # receive the earlier events of the run
    crowd.latencies.clear()
    for _ in range(20):
        await asyncio.to_thread(writer.write, [runs[0][0]])
        await asyncio.sleep(0.5)
    assert len(crowd.latencies) == 20 * STREAMS, len(crowd.latencies)
    crowd.close()
    return [
        Metric(f"memory a stream, {STREAMS} open on one process", f"{each / 1024:.1f} KiB", target="≤ 32 KiB"),
        Metric("request to first event, one after the other", milliseconds(client.starts), target="≤ 100 ms"),
        Metric(
            f"delta, commit to client, {sent / SECONDS:.0f} a second over {STREAMS} streams",
            milliseconds(latencies),
            target="p99 ≤ 250 ms",
        ),
        Metric(f"the same, {STREAMS} streams of one run", milliseconds(crowd.latencies), target="p99 ≤ 250 ms"),
        Metric("CPU of the stream process a delta", f"{cpu / sent * 1000:.2f} ms"),
        compared(f"GET run, {STREAMS} silent streams open", beside, alone),
        compared("GET run, while they receive deltas; baseline: the same writes without streams", during, before),
    ]


async def write(stack: Stack, writer: Writer, runs: list[tuple[str, str]]) -> tuple[int, list[float]]:
    """Write deltas to all runs in turns for SECONDS. Returns their number, and the seconds of each GET at that time."""
    sent = 0
    reading = asyncio.create_task(asyncio.to_thread(read_runs, stack, runs))
    begun = time.monotonic()
    while time.monotonic() - begun < SECONDS:
        start = (sent * 7) % STREAMS
        await asyncio.to_thread(writer.write, [runs[(start + n) % STREAMS][0] for n in range(RUNS_A_TICK)])
        sent += RUNS_A_TICK
        await asyncio.sleep(TICK)
    return sent, await reading


def compared(name: str, took: list[float], baseline: list[float]) -> Metric:
    ratio = statistics.median(took) / statistics.median(baseline)
    return Metric(name, milliseconds(took), milliseconds(baseline), ratio, "≤ 1.5")


def read_runs(stack: Stack, runs: list[tuple[str, str]]) -> list[float]:
    took = []
    run_id, token = runs[-1]
    http = Connection(stack.port, token)
    for _ in range(READS):
        begun = time.perf_counter()
        http.json("GET", f"/api/v1/runs/{run_id}")
        took.append(time.perf_counter() - begun)
        time.sleep(0.02)
    return took


def main() -> None:
    services = {"database_url": os.environ["TEST_DATABASE_URL"], "redis_url": os.environ["TEST_REDIS_URL"]}
    with Stack(**services) as stack:
        metrics = measure(stack)
    report("streams", metrics)


if __name__ == "__main__":
    main()
