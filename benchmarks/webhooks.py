"""Webhook deliveries of one worker process, on PostgreSQL and Redis: throughput, CPU, effect of hanging receivers.

``make bench``, or ``python -m tests.stack.run_services python -m benchmarks webhooks``.
"""

import json
import os
import statistics
import time

import psycopg
import redis
from celery import Celery

from benchmarks.harness import Metric, cpu_seconds, milliseconds, percentile, report, wait_until
from tests.stack.process import free_port, python
from tests.stack.stack import CELERY, WORKER, Stack

DELIVERIES = 4000
ENDPOINTS = 200
HANGING = 200
GOOD = 200
GOOD_EVERY_SECONDS = 0.05
EMPTY_TASKS = 4000
LOOP_REQUESTS = 4000
LOOP_CLIENTS = 256
BODY = json.dumps({"id": "evt", "type": "agent.started", "runId": "run", "chatId": "chat", "occurredAt": "2026-11-20"})

# For each path of the receiver, users with one endpoint each.
MAKE_ENDPOINTS = """
import secrets
from django.contrib.auth import get_user_model
from webhooks.models import Endpoint
for path, count in {paths!r}.items():
    User = get_user_model()
    users = User.objects.bulk_create(User(username=f"{{path}}-{{number}}") for number in range(count))
    Endpoint.objects.bulk_create(
        Endpoint(user=user, url=f"http://127.0.0.1:{port}/{{path}}", secret=secrets.token_hex()) for user in users
    )
"""
# The baseline: the outbound client alone with the same number of concurrent requests. Prints seconds and CPU seconds.
LOOP = """
import asyncio, time
from config.outbound import client
async def send(numbers):
    for number in numbers:
        await client.asend("POST", "http://127.0.0.1:{port}/{path}", headers={{}}, body={body!r},
            total_timeout=15, max_bytes=65536, allow_private=True, reuse=True)
async def all_of(count):
    numbers = iter(range(count))
    await asyncio.gather(*(send(numbers) for _ in range({clients})))
async def main():
    await all_of({clients} * 2)
    begun, cpu = time.perf_counter(), time.process_time()
    await all_of({count})
    print(time.perf_counter() - begun, time.process_time() - cpu)
asyncio.run(main())
"""
INSERT = """
    INSERT INTO webhooks_delivery (
        id, event_id, endpoint_id, user_id, event_type, run_id, chat_id, body,
        status, attempt_count, next_attempt_at, created_at
    )
    SELECT
        'dlv_' || %(mark)s || n, 'evt_' || %(mark)s || n, endpoint.id, endpoint.user_id,
        'agent.started', 'run', 'chat', %(body)s, 'PENDING', 0,
        clock_timestamp() - interval '1 second', clock_timestamp()
    FROM generate_series(0, %(count)s - 1) n
    JOIN (
        SELECT *, row_number() OVER (ORDER BY id) - 1 AS number, count(*) OVER () AS all_of_them
        FROM webhooks_endpoint WHERE url LIKE '%%/' || %(path)s
    ) endpoint ON endpoint.number = n %% endpoint.all_of_them
"""


class Bench:
    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.sql = psycopg.connect(stack.environment["DATABASE_URL"], autocommit=True)
        self.broker = Celery(broker=stack.environment["REDIS_URL"])
        self.port = free_port()
        stack.add("receiver", python("-m", "benchmarks.receiver", str(self.port)))
        paths = {"instant": ENDPOINTS, "slow": ENDPOINTS, "hang": HANGING, "good": 1}
        stack.manage("shell", "--no-imports", "-c", MAKE_ENDPOINTS.format(paths=paths, port=self.port))
        self.sql.execute("UPDATE webhooks_endpoint SET url = replace(url, '/good', '/instant?good')")
        self.marks = 0

    @property
    def pid(self) -> int:
        return self.stack.processes["webhooks"].pid

    def count(self, condition: str, *values: object) -> int:
        row = self.sql.execute(f"SELECT count(*) FROM webhooks_delivery WHERE {condition}", values).fetchone()  # type: ignore[arg-type]
        assert row is not None
        return int(row[0])

    def record(self, path: str, count: int) -> str:
        """Insert due deliveries for the endpoints at ``path`` and send the nudge. Returns the prefix of their ids."""
        self.marks += 1
        mark = f"{self.marks:04}_"
        self.sql.execute(INSERT, {"mark": mark, "body": BODY, "count": count, "path": path})
        self.broker.send_task("webhooks.deliver_due", queue="webhooks", ignore_result=True)
        return f"dlv_{mark}"

    def throughput(self, path: str) -> tuple[float, float]:
        """Deliveries per second until the last outcome is recorded, and CPU milliseconds per delivery."""
        self.record(path, ENDPOINTS)
        wait_until(lambda: self.count("status = 'PENDING'") == 0, 60)  # warm
        cpu = cpu_seconds([self.pid])
        mark = self.record(path, DELIVERIES)
        begun = time.perf_counter()
        wait_until(lambda: self.count("status = 'PENDING'") == 0, 120, 0.1)
        cpu = cpu_seconds([self.pid]) - cpu
        wait = time.perf_counter() - begun
        assert self.count("status = 'DELIVERED' AND id LIKE %s", f"{mark}%") == DELIVERIES
        row = self.sql.execute(
            "SELECT extract(epoch FROM max(finished_at) - max(created_at)) FROM webhooks_delivery WHERE id LIKE %s",
            (f"{mark}%",),
        ).fetchone()
        assert row is not None
        assert row[0] <= wait + 0.5, "the deliveries finished before the measurement"
        return DELIVERIES / float(row[0]), cpu * 1000 / DELIVERIES

    def loop(self, path: str) -> tuple[float, float]:
        """Requests per second of the outbound client alone, and CPU milliseconds per request."""
        program = LOOP.format(port=self.port, path=path, body=BODY.encode(), clients=LOOP_CLIENTS, count=LOOP_REQUESTS)
        seconds, cpu = self.stack.manage("shell", "--no-imports", "-c", program).split()[-2:]
        return LOOP_REQUESTS / float(seconds), float(cpu) * 1000 / LOOP_REQUESTS

    def empty_tasks(self) -> tuple[float, float]:
        """Empty Celery tasks per second of one worker process, and CPU milliseconds per task."""
        broker = redis.Redis.from_url(self.stack.environment["REDIS_URL"])
        for number in range(EMPTY_TASKS):
            self.broker.send_task("benchmarks.empty", (number,), queue="bare", ignore_result=True)
        command = [*CELERY, *WORKER, "-n", "bare@%h", "-c", "4", "-Q", "bare", "-I", "benchmarks.bare"]
        process = self.stack.add("bare", command)
        assert process is not None
        self.stack.wait_until_ready("bare")
        waiting, begun, cpu = int(broker.llen("bare")), time.perf_counter(), cpu_seconds([process.pid])  # type: ignore[arg-type]
        wait_until(lambda: not broker.llen("bare"), 120)
        rate = waiting / (time.perf_counter() - begun)
        cpu = (cpu_seconds([process.pid]) - cpu) * 1000 / waiting
        self.stack.kill("bare")
        del self.stack.processes["bare"]
        return rate, cpu

    def good_ones(self) -> list[float]:
        """The seconds from recorded to delivered of single deliveries to a receiver that responds at once."""
        marks = []
        for _ in range(GOOD):
            marks.append(self.record("instant?good", 1))
            time.sleep(GOOD_EVERY_SECONDS)
        done = "status = 'DELIVERED' AND left(id, 9) = ANY(%s)"
        wait_until(lambda: self.count(done, marks) == GOOD, 60)
        rows = self.sql.execute(
            "SELECT extract(epoch FROM finished_at - created_at) FROM webhooks_delivery WHERE left(id, 9) = ANY(%s)",
            (marks,),
        ).fetchall()
        return [float(row[0]) for row in rows]

    def beside_hanging(self) -> tuple[list[float], int]:
        """The same while other receivers hang, and the number of attempts that wait for those receivers at the end."""
        self.record("hang", HANGING * 4)
        under_way = "claim_id IS NOT NULL AND next_attempt_at > now()"
        wait_until(lambda: self.count(under_way) >= HANGING, 30)
        took = self.good_ones()
        return took, self.count(under_way)


def main() -> None:
    services = {"database_url": os.environ["TEST_DATABASE_URL"], "redis_url": os.environ["TEST_REDIS_URL"]}
    with Stack(**services, run_workers=0, without=("maintenance", "beat")) as stack:
        bench = Bench(stack)
        metrics = []
        for path, receiver in (("slow", "a receiver that takes 50 ms"), ("instant", "a receiver that answers at once")):
            # Before and after, because the machine's speed varies.
            before = bench.empty_tasks()
            rate, cpu = bench.throughput(path)
            empty, empty_cpu = (statistics.mean(pair) for pair in zip(before, bench.empty_tasks(), strict=True))
            bare, bare_cpu = bench.loop(path)
            metrics += [
                Metric(
                    f"deliveries to {receiver}", f"{rate:.0f}/s", f"{empty:.0f} empty tasks/s", rate / empty, "≥ 1.5"
                ),
                Metric("the same", f"{rate:.0f}/s", f"{bare:.0f}/s by the bare client", rate / bare),
                Metric("CPU each", f"{cpu:.2f} ms", f"{empty_cpu:.2f} ms an empty task", cpu / empty_cpu, "≤ 2 ms"),
                Metric("the same", f"{cpu:.2f} ms", f"{bare_cpu:.2f} ms by the bare client", cpu / bare_cpu),
            ]
        alone = bench.good_ones()
        beside, hanging = bench.beside_hanging()
        metrics.append(
            Metric(
                f"recorded to delivered, beside {HANGING} hanging receivers ({hanging} attempts under way)",
                milliseconds(beside),
                f"{milliseconds(alone)} alone",
                percentile(beside, 0.99) / percentile(alone, 0.99),
                "p99 ≤ 2 s",
            )
        )
    report("webhooks", metrics)


if __name__ == "__main__":
    main()
