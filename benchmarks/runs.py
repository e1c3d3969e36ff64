"""Runs end to end on PostgreSQL and Redis: throughput, latency, CPU, memory, cancels, takeover.

``make bench``, or ``python -m tests.stack.run_services python -m benchmarks runs``.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import psycopg
import redis
from celery import Celery

from benchmarks.harness import Connection, Metric, cpu_seconds, milliseconds, report, rss, side_by_side, wait_until
from tests.stack.process import free_port, python
from tests.stack.stack import CELERY, WORKER, Stack

CLIENTS = 16
# During the first runs, each connection plans and prepares its statements, and PostgreSQL fills its caches.
WARM_RUNS, RUNS = 600, 1000
EMPTY_TASKS = 4000
LATENCIES = 200
READS, READ_ROUNDS = 3000, 10
IN_FLIGHT = 1000
CANCELS = 100
USERS = 20
MESSAGE = "/say A constant."


class Bench:
    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.sql = psycopg.connect(stack.environment["DATABASE_URL"], autocommit=True)
        self.tokens = [stack.token(f"user{number}") for number in range(USERS)]
        self.workers = [name for name in stack.processes if name.startswith("runs-")]
        self.redis = redis.Redis.from_url(stack.environment["REDIS_URL"])
        self.metrics: list[Metric] = []

    def connection(self, user: int = 0) -> Connection:
        return Connection(self.stack.port, self.tokens[user % USERS])

    def pid(self, name: str) -> int:
        popen = self.stack.processes[name].popen
        assert popen is not None
        return popen.pid

    def one(self, query: str, *args: object) -> object:
        row = self.sql.execute(query, args).fetchone()
        assert row is not None
        return row[0]

    def chats(self, count: int) -> list[str]:
        connections = [self.connection(number) for number in range(USERS)]
        return [connections[n % USERS].json("POST", "/api/v1/chats", {})["id"] for n in range(count)]

    # --- baselines ---------------------------------------------------------------------------------------------------

    def tasks(self) -> Tasks:
        """Measure empty Celery tasks with as many worker processes as for runs."""
        url = self.stack.environment["REDIS_URL"]
        app = Celery(broker=url)

        def send(_: int, number: int) -> None:
            app.send_task("benchmarks.empty", (number,), queue="bare", ignore_result=True)

        def latency() -> float:
            sent = time.time()
            app.send_task("benchmarks.begun", (url, "begun"), queue="bare", ignore_result=True)
            _, begun = self.redis.blpop(["begun"], 10)  # type: ignore[misc]
            return float(begun) - sent

        side_by_side(CLIENTS, EMPTY_TASKS, send)
        names = [f"bare-{number}" for number in range(len(self.workers))]
        for name in names:
            command = [*CELERY, *WORKER, "-n", f"{name}@%h", "-c", "4", "-Q", "bare", "-I", "benchmarks.bare"]
            self.stack.add(name, command)
        self.stack.wait_until_ready(*names)
        waiting, begun = int(self.redis.llen("bare")), time.perf_counter()  # type: ignore[arg-type]
        wait_until(lambda: not self.redis.llen("bare"), 120)
        ready = waiting / (time.perf_counter() - begun)
        pids = [self.pid(name) for name in names]
        cpu, begun = cpu_seconds(pids), time.perf_counter()
        side_by_side(CLIENTS, EMPTY_TASKS, send)
        wait_until(lambda: not self.redis.llen("bare"), 120)
        sent = EMPTY_TASKS / (time.perf_counter() - begun)
        each = (cpu_seconds(pids) - cpu) * 1000 / EMPTY_TASKS
        latencies = [latency() for _ in range(LATENCIES)]
        for name in names:
            self.stack.kill(name)
            del self.stack.processes[name]
        return Tasks(sent, ready, each, latencies)

    def reads(self, path: str) -> tuple[list[float], list[float]]:
        """The seconds of each GET of ``path`` and of the bare view on the same kind of server.

        Both are measured in turns, because the machine's speed varies.
        """
        port = free_port()
        self.stack.add(
            "bare-web",
            python("-m", "granian", "--interface", "asgi", "--http", "1", "--port", str(port), "benchmarks.bare_wsgi"),
        )
        bare_path = f"/bare/{self.chats(1)[0]}"

        def answers() -> bool:
            try:
                return Connection(port).request("GET", bare_path)[0] == 200
            except OSError:
                return False

        wait_until(answers, 30)
        get, get_bare = self.getter(self.stack.port, path), self.getter(port, bare_path)
        for call in (get, get_bare):
            side_by_side(CLIENTS, READS // 5, call)  # warm
        took: list[float] = []
        bare: list[float] = []
        for _ in range(READ_ROUNDS):
            bare += side_by_side(CLIENTS, READS // READ_ROUNDS, get_bare)
            took += side_by_side(CLIENTS, READS // READ_ROUNDS, get)
        self.stack.kill("bare-web")
        del self.stack.processes["bare-web"]
        return took, bare

    def getter(self, port: int, path: str) -> Callable[[int, int], None]:
        connections = [Connection(port, self.tokens[0]) for _ in range(CLIENTS)]

        def get(client: int, _: int) -> None:
            status, content = connections[client].request("GET", path)
            if status != 200:
                raise RuntimeError(content[:300])

        return get

    # --- metrics -----------------------------------------------------------------------------------------------------

    def throughput(self, count: int = RUNS) -> tuple[float, float, list[float]]:
        """Runs per second from the first POST to the last completed run, CPU milliseconds per run, seconds per POST."""
        chats = self.chats(count)
        before = self.one("SELECT count(*) FROM runs_run WHERE status = 'completed'")
        assert isinstance(before, int)
        connections = [[self.connection(user) for user in range(USERS)] for _ in range(CLIENTS)]
        pids = [self.pid("web"), *(self.pid(name) for name in self.workers)]
        cpu = cpu_seconds(pids)
        begun = time.perf_counter()

        def start(client: int, number: int) -> None:
            connections[client][number % USERS].json(
                "POST", f"/api/v1/chats/{chats[number]}/runs", {"message": MESSAGE}
            )

        took = side_by_side(CLIENTS, count, start)
        wait_until(
            lambda: self.one("SELECT count(*) FROM runs_run WHERE status = 'completed'") == before + count, 180, 0.05
        )
        seconds = time.perf_counter() - begun
        return count / seconds, (cpu_seconds(pids) - cpu) * 1000 / count, took

    def start_latency(self, count: int = LATENCIES) -> list[float]:
        """The seconds from the response of the POST to running, one run at a time."""
        latencies = []
        chats = self.chats(count)
        connections = [self.connection(user) for user in range(USERS)]
        for number, chat in enumerate(chats):
            run = connections[number % USERS].json("POST", f"/api/v1/chats/{chat}/runs", {"message": MESSAGE})["id"]
            answered = time.time()
            query = "SELECT extract(epoch FROM started_at) FROM runs_run WHERE id = %s AND status = 'completed'"
            wait_until(lambda query=query, run=run: self.sql.execute(query, (run,)).fetchone() is not None, 10, 0.01)
            latencies.append(max(0.0, float(self.one(query, run)) - answered))  # type: ignore[arg-type]
        return latencies

    def in_flight(self) -> tuple[int, int, int, list[float]]:
        """Memory of a process without runs and the additional memory of IN_FLIGHT runs that wait for a slow model, in
        bytes; its number of database connections; the seconds from cancel to cancelled.
        """
        name = self.workers[0]
        for other in self.workers[1:]:
            self.stack.kill(other, 15)
        wait_until(lambda: not any(self.stack.processes[other].running for other in self.workers[1:]), 40)
        empty = rss(self.pid(name))
        chats = self.chats(IN_FLIGHT)
        connections = [[self.connection(user) for user in range(USERS)] for _ in range(CLIENTS)]

        def start(client: int, number: int) -> None:
            path = f"/api/v1/chats/{chats[number]}/runs"
            connections[client][number % USERS].json("POST", path, {"message": "/wait 120\n/say done"})

        side_by_side(CLIENTS, IN_FLIGHT, start)
        running = "SELECT count(*) FROM runs_run WHERE status = 'running'"
        wait_until(lambda: self.one(running) == IN_FLIGHT, 120, 0.1)
        added = rss(self.pid(name)) - empty
        port = int(self.stack.environment["DATABASE_URL"].rpartition(":")[2].split("/")[0])
        held = sum(
            1
            for connection in psutil.Process(self.pid(name)).net_connections("tcp")
            if connection.raddr and connection.raddr.port == port
        )
        rows = self.sql.execute("SELECT id, user_id FROM runs_run WHERE status = 'running' LIMIT 500").fetchall()
        # 500 runs stay in flight. Some of these are cancelled.
        users = dict(self.sql.execute("SELECT id, username FROM auth_user").fetchall())
        others = self.sql.execute(
            "SELECT id, user_id FROM runs_run WHERE status = 'running' AND NOT id = ANY(%s)",
            ([row[0] for row in rows],),
        ).fetchall()
        by_name = {f"user{n}": n for n in range(USERS)}

        def cancel(client: int, run: str, user: int) -> None:
            connections[client][by_name[users[user]]].json("POST", f"/api/v1/runs/{run}/cancel")

        side_by_side(CLIENTS, len(others), lambda client, n: cancel(client, *others[n]))
        wait_until(lambda: self.one(running) == len(rows), 60, 0.1)
        latencies = []
        query = "SELECT extract(epoch FROM finished_at) FROM runs_run WHERE id = %s AND status = 'cancelled'"
        for run, user in rows[:CANCELS]:
            asked = time.time()
            cancel(0, run, user)
            wait_until(lambda run=run: self.sql.execute(query, (run,)).fetchone() is not None, 10, 0.005)
            latencies.append(float(self.one(query, run)) - asked)  # type: ignore[arg-type]
        side_by_side(CLIENTS, len(rows) - CANCELS, lambda client, n: cancel(client, *rows[CANCELS + n]))
        wait_until(lambda: self.one(running) == 0, 60, 0.1)
        for other in self.workers[1:]:
            self.stack.restart(other)
        return empty, added, held, latencies

    def takeover(self) -> float:
        """The seconds from ``kill -9`` of a run's worker until another worker owns the run."""
        chat = self.chats(1)[0]
        message = '/call calculate {"expression": "1"}\n/wait 2\n/call calculate {"expression": "2"}\n/say {result}'
        run = self.connection(0).json("POST", f"/api/v1/chats/{chat}/runs", {"message": message})["id"]
        turns = "SELECT count(*) FROM runs_turn WHERE run_id = %s"
        wait_until(lambda: self.one(turns, run) == 1, 20)
        owner = self.one("SELECT pid FROM runs_worker w JOIN runs_run r ON r.worker_id = w.id WHERE r.id = %s", run)
        name = next(name for name in self.workers if self.pid(name) == owner)
        self.stack.kill(name)
        begun = time.perf_counter()
        wait_until(lambda: self.one("SELECT lease_token FROM runs_run WHERE id = %s", run) >= 2, 60)  # type: ignore[operator]
        wait_until(
            lambda: (
                self.one("SELECT worker_id IS NOT NULL OR status <> 'running' FROM runs_run WHERE id = %s", run) is True
            ),
            60,
        )
        seconds = time.perf_counter() - begun
        wait_until(lambda: self.one("SELECT status FROM runs_run WHERE id = %s", run) == "completed", 60)
        assert self.one("SELECT count(*) FROM runs_toolinvocation WHERE run_id = %s", run) == 2
        self.stack.restart(name)
        return seconds

    def run_with_ten_calls(self) -> str:
        chat = self.chats(1)[0]
        message = "\n".join(['/call calculate {"expression": "6*7"}'] * 10)
        http = self.connection(0)
        run: str = http.json("POST", f"/api/v1/chats/{chat}/runs", {"message": message})["id"]
        wait_until(lambda: http.json("GET", f"/api/v1/runs/{run}")["status"] == "completed", 30)
        return run


@dataclass
class Tasks:
    """Empty tasks per second, with sending (by CLIENTS clients) and of queued tasks; CPU milliseconds of the workers
    per task; the seconds from sending to start of each task on idle workers.
    """

    sent: float
    ready: float
    cpu: float
    latencies: list[float]


def median_ratio(values: list[float], baseline: list[float]) -> float:
    return statistics.median(values) / statistics.median(baseline)


def main() -> None:
    services = {"database_url": os.environ["TEST_DATABASE_URL"], "redis_url": os.environ["TEST_REDIS_URL"]}
    settings = {"RUN_USER_LIMIT": str(IN_FLIGHT // USERS), "SIGNUP_CREDITS": "1000000", "WEB_WORKERS": "1"}
    with Stack(**services, run_workers=2, environment=settings) as stack:
        bench = Bench(stack)
        metrics = bench.metrics
        bench.throughput(WARM_RUNS)
        tasks = bench.tasks()
        rate, cpu, posts = bench.throughput()
        starts = bench.start_latency()
        reads, bare = bench.reads(f"/api/v1/runs/{bench.run_with_ten_calls()}")
        sent = f"{tasks.sent:.0f} empty tasks/s, sent to done"
        ready = f"{tasks.ready:.0f} queued empty tasks/s"
        view = f"a bare view's {milliseconds(bare)}"
        metrics += [
            Metric("runs/s, POST to completed", f"{rate:.0f}/s", sent, rate / tasks.sent, "≥ 60/s, ≥ 0.25"),
            Metric("the same", f"{rate:.0f}/s", ready, rate / tasks.ready),
            Metric(
                "CPU a run, web and workers",
                f"{cpu:.1f} ms",
                f"{tasks.cpu:.1f} ms an empty task, workers",
                cpu / tasks.cpu,
                "≤ 15 ms",
            ),
            Metric("POST run, 16 clients", milliseconds(posts), view, median_ratio(posts, bare)),
            Metric(
                "start latency, idle",
                milliseconds(starts),
                f"an empty task's {milliseconds(tasks.latencies)}",
                median_ratio(starts, tasks.latencies),
                "≤ 15 ms, ≤ 60 ms",
            ),
            Metric("GET run with 10 calls, 16 clients", milliseconds(reads), view, median_ratio(reads, bare), "≤ 2.0"),
        ]
        empty, added, held, cancels = bench.in_flight()
        each = added / IN_FLIGHT
        metrics += [
            Metric(
                f"memory of 100 waiting runs, {IN_FLIGHT} in one process",
                f"{each * 100 / 2**20:.1f} MiB",
                f"the process without any, {empty / 2**20:.0f} MiB",
                each * 100 / empty,
                "≤ 100 KiB a run",
            ),
            Metric("its database connections", str(held), target="≤ 20"),
            Metric("cancel to cancelled, 500 in flight", milliseconds(cancels), target="≤ 250 ms, ≤ 1 s"),
            Metric("takeover after kill -9", f"{bench.takeover():.1f} s", target="≤ 15 s"),
        ]
        report("runs", metrics)


if __name__ == "__main__":
    main()
