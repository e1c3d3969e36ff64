"""Servers that take the same load from the same client: this service, and any server of the Agent Protocol.

A side does not know what is measured. ``benchmarks.peers`` and ``benchmarks.floor`` measure.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from benchmarks.harness import Connection, cpu_seconds, memory, side_by_side, wait_until
from tests.stack.postgres import PostgresServer
from tests.stack.process import Process
from tests.stack.redis import RedisServer
from tests.stack.stack import Stack

USERS = 20
TOKENS = """
from django.core.management import call_command
for number in range({users}):
    call_command("session_token", f"user{{number}}", create=True)
"""
ASSISTANT = "constant"
RUN_SECONDS = 180
POLL_SECONDS = 0.1
# After the last response of a run's end, its worker still writes a few bytes.
SETTLE_SECONDS = 0.1


@dataclass(frozen=True)
class Path:
    """A path and the token of the user that may use it."""

    path: str
    token: str = ""


class Side(ABC):
    """``processes``: all processes that do its work, by name. Their children belong to them."""

    def __init__(self, name: str, port: int, processes: Mapping[str, Process]) -> None:
        self.name, self.port, self.processes = name, port, processes

    @abstractmethod
    def chat(self, http: Connection, number: int) -> Path:
        """Create the chat of this number. Returns the path at which its runs are started."""

    @abstractmethod
    def start(self, http: Connection, chat: Path) -> Path:
        """Start a run. Returns the path of the run."""

    @abstractmethod
    def end(self, http: Connection, run: Path) -> float | None:
        """The time at which the run ended, in seconds since the epoch. None if it has not ended."""

    def cpu(self) -> dict[str, float]:
        """The seconds of each process since its start."""
        return {name: cpu_seconds([process.pid]) for name, process in self.processes.items()}

    def memory(self) -> dict[str, int]:
        """The bytes of each process."""
        return {name: memory(process.pid) for name, process in self.processes.items()}


class Service(Side):
    """This service on PostgreSQL and Redis of its own. ``tokens`` are those of its users, in the order of their ids."""

    def __init__(self, stack: Stack, postgres: PostgresServer, redis: RedisServer, users: int = USERS) -> None:
        servers = {"PostgreSQL": postgres, "Redis": redis}
        super().__init__("this service", stack.port, {**stack.processes, **servers})
        self.stack = stack
        self.tokens = stack.manage("shell", "--no-imports", "-c", TOKENS.format(users=users)).split()

    def chat(self, http: Connection, number: int) -> Path:
        token = self.tokens[number % len(self.tokens)]
        chat = http.json("POST", "/api/v1/chats", {}, token=token)["id"]
        return Path(f"/api/v1/chats/{chat}/runs", token)

    def start(self, http: Connection, chat: Path) -> Path:
        return self.start_message(http, chat, "/say A constant.")

    def start_message(self, http: Connection, chat: Path, message: str) -> Path:
        run = http.json("POST", chat.path, {"message": message}, token=chat.token)["id"]
        return Path(f"/api/v1/runs/{run}", chat.token)

    def end(self, http: Connection, run: Path) -> float | None:
        found = http.json("GET", run.path, token=run.token)
        if found["finishedAt"] is None:
            return None
        return ended(found, found["status"] == "completed", found["finishedAt"])


class AgentProtocol(Side):
    """A server of LangGraph's API, with a graph that answers with a constant. It asks for no token."""

    def chat(self, http: Connection, number: int) -> Path:
        thread = http.json("POST", "/threads", {})["thread_id"]
        return Path(f"/threads/{thread}/runs")

    def start(self, http: Connection, chat: Path) -> Path:
        message = {"role": "user", "content": "Hello"}
        run = http.json("POST", chat.path, {"assistant_id": ASSISTANT, "input": {"messages": [message]}})["run_id"]
        return Path(f"{chat.path}/{run}")

    def end(self, http: Connection, run: Path) -> float | None:
        found = http.json("GET", run.path)
        if found["status"] in ("pending", "running"):
            return None
        return ended(found, found["status"] == "success", found["updated_at"])


def ended(run: Mapping[str, Any], well: bool, at: str) -> float:
    if not well:
        raise RuntimeError(f"a run failed: {run}")
    return datetime.fromisoformat(at).timestamp()


@contextmanager
def service(run_workers: int = 2, users: int = USERS, **settings: str) -> Iterator[Service]:
    """One web process and the run workers. Its PostgreSQL waits for the disk at each commit, as in production."""
    settings = {"RUN_USER_LIMIT": "0", "SIGNUP_CREDITS": "1000000", "WEB_WORKERS": "1", **settings}
    with PostgresServer(durable=True) as postgres, RedisServer() as redis:
        database_url, redis_url = postgres.url(), redis.url()
        with Stack(
            database_url=database_url, redis_url=redis_url, run_workers=run_workers, environment=settings
        ) as stack:
            yield Service(stack, postgres, redis, users)


# --- the load --------------------------------------------------------------------------------------------------------


@dataclass
class Load:
    """Runs per second from the first POST to the end of the last run, by the server's times (``rate``) and as its
    clients see it (``seen``); the seconds of each POST; the CPU milliseconds per run of each process; the runs.
    """

    rate: float
    seen: float
    posts: list[float]
    cpu: dict[str, float]
    runs: list[Path]


def start_runs(side: Side, count: int, clients: int) -> Load:
    """Start ``count`` runs from ``clients`` clients, each in a chat of its own, and wait for their ends.

    Questions for the ends would slow down the runs, therefore each client asks for its last run alone, every
    POLL_SECONDS, while others may be at work. CPU is shared among the runs that have ended when it is read.
    """
    connections = [Connection(side.port) for _ in range(clients)]
    chats: list[Any] = [None] * count
    runs: list[Any] = [None] * count

    def create(client: int, number: int) -> None:
        chats[number] = side.chat(connections[client], number)

    def start(client: int, number: int) -> None:
        runs[number] = side.start(connections[client], chats[number])

    side_by_side(clients, count, create)
    cpu, begun = side.cpu(), time.time()
    posts = side_by_side(clients, count, start)
    last = runs[-clients:]
    side_by_side(clients, len(last), lambda client, number: wait_for_end(side, connections[client], last[number]))
    seen = time.time()
    time.sleep(SETTLE_SECONDS)
    after, read_at = side.cpu(), time.time()
    ends = [wait_for_end(side, connections[0], run) for run in runs]
    finished = sum(end <= read_at for end in ends)
    each = {name: (after[name] - cpu[name]) * 1000 / finished for name in cpu}
    return Load(count / (max(ends) - begun), count / (seen - begun), posts, each, runs)


def wait_for_end(side: Side, http: Connection, run: Path) -> float:
    found: list[float] = []

    def has_ended() -> bool:
        end = side.end(http, run)
        if end is not None:
            found.append(end)
        return bool(found)

    wait_until(has_ended, RUN_SECONDS, POLL_SECONDS)
    return found[0]


def read(port: int, paths: Sequence[Path], count: int, clients: int) -> list[float]:
    """The seconds of each of ``count`` GETs of the paths, by turns."""
    connections = [Connection(port) for _ in range(clients)]

    def get(client: int, number: int) -> None:
        path = paths[number % len(paths)]
        status, content = connections[client].request("GET", path.path, token=path.token)
        if status != 200:
            raise RuntimeError(f"GET {path.path}: {status} {content[:300]!r}")

    return side_by_side(clients, count, get)
