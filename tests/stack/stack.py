"""The whole service as real processes with separate state. Tests use it over HTTP, as users do.

    with Stack(run_workers=2, environment={"RUN_LEASE_SECONDS": "2"}) as stack:
        chat = stack.session("ada").post("/chats", json={}).json()
        stack.kill("runs-1")

This module does not import the service's code. Beyond HTTP it uses only ``manage.py`` and the key of
the session tokens.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import jwt
import psycopg
import requests

from tests.stack import postgres, redis
from tests.stack.process import ROOT, Process, free_port, python, remove_directory, run, temporary_directory, wait_for

T = TypeVar("T")
START_SECONDS = 90.0
SERVICES = ("DATABASE_URL", "REDIS_URL", "TEST_DATABASE_URL", "TEST_REDIS_URL", "VAR_DIR", "PORT", "BASE_URL")
CELERY = python("-m", "celery", "-q", "--skip-checks", "-A", "config")
WORKER = ("worker", "-P", "threads", "--without-gossip", "--without-mingle", "--without-heartbeat")
UNCHECKED = ("check_invariants", "reconcile_credits", "session_token", "grant_credits", "callback")

# All running stacks, for the report of a failed test.
live: list[Stack] = []
# Migrated and empty databases, which every stack of this process copies: (kind, server) → path or name.
templates: dict[str, str] = {}
# A dump of the first of them, from which the templates of other servers are made.
dumps: list[bytes] = []


class Client:
    """One surface as one user. Paths are relative to the surface. Threads may share a client."""

    def __init__(self, base: str, credential: str, timeout: float = 15.0) -> None:
        self.base, self.credential, self.timeout = base, credential, timeout
        self._local = threading.local()

    def request(self, method: str, path: str, **options: Any) -> requests.Response:
        """Like ``requests.request``. An absolute URL is used unchanged."""
        http = getattr(self._local, "http", None)
        if http is None:
            http = self._local.http = requests.Session()
            http.trust_env = False
            http.headers["Authorization"] = f"Bearer {self.credential}"
        url = path if path.startswith("http") else self.base + path
        answer: requests.Response = http.request(method, url, **{"timeout": self.timeout, **options})
        return answer

    def get(self, path: str, **options: Any) -> requests.Response:
        return self.request("GET", path, **options)

    def post(self, path: str, json: Any = None, **options: Any) -> requests.Response:
        return self.request("POST", path, json={} if json is None else json, **options)

    def patch(self, path: str, json: Any = None, **options: Any) -> requests.Response:
        return self.request("PATCH", path, json={} if json is None else json, **options)

    def put(self, path: str, data: Any = None, **options: Any) -> requests.Response:
        return self.request("PUT", path, data=data, **options)

    def delete(self, path: str, **options: Any) -> requests.Response:
        return self.request("DELETE", path, **options)


class Stack:
    """Web, run workers, webhook and maintenance workers, beat and, without ``redis_url``, a broker.

    ``database_url`` and ``redis_url`` name servers; the stack creates its own database on each. Without them it runs
    on SQLite and the embedded broker. ``environment`` is for all processes, ``process_environment`` for one by name:
    ``web``, ``runs-1`` … ``runs-N``, ``webhooks``, ``maintenance``, ``beat``, ``broker``. A name with dots is a
    constant of the service, for example ``runs.llm.refusals.MODEL_RETRY_SECONDS``. Rate limits are off unless
    ``environment`` enables them. ``prepare`` is Python code that ``manage.py shell`` runs before the processes start,
    so that they find its rows in the database.
    """

    def __init__(
        self,
        *,
        database_url: str | None = None,
        redis_url: str | None = None,
        run_workers: int = 1,
        environment: Mapping[str, str] | None = None,
        process_environment: Mapping[str, Mapping[str, str]] | None = None,
        without: tuple[str, ...] = (),
        prepare: str = "",
    ) -> None:
        self.directory = temporary_directory("stack-")
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.database_url, self.redis_url = database_url, redis_url
        self.own_database: str | None = None
        self.without, self.prepare = without, prepare
        self.run_workers = run_workers
        self.process_environment = dict(process_environment or {})
        self.environment = {name: value for name, value in os.environ.items() if name not in SERVICES}
        self.environment |= {
            "VAR_DIR": str(self.directory),
            "SECRET_KEY": secrets.token_urlsafe(64),
            "PORT": str(self.port),
            "BASE_URL": self.url,
            "LOG_LEVEL": "INFO",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": str(ROOT / "tests" / "stack" / "constants"),
            "OUTBOUND_ALLOW_PRIVATE": "1",
            "WEB_WORKERS": "1",
            "RATE_LIMIT_SESSION": "0",
            "RATE_LIMIT_PUBLIC": "0",
            "RATE_LIMIT_RUN_STARTS": "0",
            "RATE_LIMIT_UNAUTHENTICATED": "0",
            "RATE_LIMIT_PAGES": "0",
            **(environment or {}),
        }
        self.processes: dict[str, Process] = {}
        self._tokens: dict[str, str] = {}
        self._keys: dict[str, str] = {}

    # --- start and stop ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        live.append(self)
        try:
            self._make_database()
            if self.redis_url:
                self.environment["REDIS_URL"] = redis.own_database(self.redis_url)
            if self.prepare:
                self.manage("shell", "--no-imports", "-c", self.prepare)
            self.start_processes()
        except BaseException as error:
            if isinstance(error, Exception):
                error.add_note(self.report())
            self.stop()
            raise

    def start_processes(self) -> None:
        """Start all processes of the service and wait until they are ready."""
        if not self.redis_url:
            self.add("broker", redis.embedded_command(self.directory))
        self.add("web", python("-m", "config.serve", "--host", "127.0.0.1"))
        for number in range(1, self.run_workers + 1):
            self.add_worker(f"runs-{number}", "runs", concurrency=4)
        self.add_worker("webhooks", "webhooks,webhooks-retry", concurrency=4)
        self.add_worker("maintenance", "maintenance", concurrency=2)
        self.add("beat", python("-m", "celery", "-q", "-A", "config.beat", "beat"))
        self.wait_until_ready()

    def add(self, name: str, command: list[str]) -> Process | None:
        """Start another process of the service. None if the stack was created ``without`` it."""
        if name in self.without:
            return None
        process = Process(
            name,
            command,
            log=self.directory / f"{name}.log",
            environment={**self.environment, **self.process_environment.get(name, {})},
        )
        self.processes[name] = process
        process.start()
        return process

    def add_worker(self, name: str, queues: str, concurrency: int = 4) -> Process | None:
        return self.add(name, [*CELERY, *WORKER, "-n", f"{name}@%h", "-c", str(concurrency), "-Q", queues])

    def wait_until_ready(self, *names: str) -> None:
        """Wait until the web process answers and the workers accept tasks. Default: all processes."""
        for name in names or tuple(self.processes):
            process = self.processes[name]
            if not process.running:
                process.check()
            elif name == "web" or (name == "broker" and names and self.processes["web"].running):
                # The web process is ready as soon as the database and the broker are.
                self.wait_for(partial(is_ready, self.url), START_SECONDS, "the web process's readiness")
            elif "worker" in process.command:
                self.wait_for(partial(worker_is_ready, process), START_SECONDS, f"readiness of {name}")

    def stop(self) -> None:
        """Kill everything that was started, because its state is no longer needed."""
        for process in self.processes.values():
            process.kill()
        if self in live:
            live.remove(self)
        remove_directory(self.directory)
        if self.own_database:
            # Databases cannot be dropped if a fault test has stopped their server.
            with contextlib.suppress(psycopg.OperationalError):
                postgres.drop_database(self.own_database)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    # --- faults ------------------------------------------------------------------------------------------------------

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """SIGKILL ends the process and its children at once. After another signal this does not wait for the end."""
        process = self.processes[name]
        if number == signal.SIGKILL:
            process.kill()
        else:
            process.wanted = False
            process.send_signal(number)

    def restart(self, *names: str, environment: Mapping[str, str] | None = None) -> None:
        """Stop those that run, start all and wait until they are ready. ``environment`` stays added to theirs."""
        processes = [self.processes[name] for name in names]
        for process in processes:
            if process.running:
                process.stop()
        for process in processes:
            process.environment |= environment or {}
            # Log lines from before the restart must not count as readiness.
            process.log.replace(process.log.with_suffix(".before.log"))
            process.start()
        self.wait_until_ready(*names)

    def pause(self, name: str) -> None:
        self.processes[name].pause()

    def resume(self, name: str) -> None:
        self.processes[name].resume()

    # --- users -------------------------------------------------------------------------------------------------------

    def manage(self, *arguments: str, check: bool = True) -> str:
        """The output of ``manage.py ARGUMENTS`` in the environment of the stack."""
        # On a busy machine, a command may compute for longer in a transaction than a test lets the processes be idle.
        limit = "config.settings.DATABASE_IDLE_TRANSACTION_SECONDS"
        environment = {name: value for name, value in self.environment.items() if name != limit}
        # Django's checks, which `make check` runs too, take as long as these commands.
        skip = ["--skip-checks"] if arguments[0] in UNCHECKED else []
        done = run(python("manage.py", *arguments, *skip), environment, timeout=None)
        if check and done.returncode:
            raise AssertionError(f"manage.py {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")
        return done.stdout

    def token(self, username: str) -> str:
        """A session token. The first use creates the user."""
        if username not in self._tokens:
            answer = self._made_here(username) or self.manage("session_token", username, "--create")
            self._tokens[username] = answer.strip().splitlines()[-1]
        return self._tokens[username]

    def _made_here(self, username: str) -> str | None:
        """The token that the command prints, without the start of a process. The user's first request creates the user.
        None if there is no web process, or one that counts requests.
        """
        web, key = self.processes.get("web"), Path(self.environment["VAR_DIR"]) / "session_key.pem"
        if not (web and web.running and key.exists()) or self.environment["RATE_LIMIT_SESSION"] != "0":
            return None
        local = {"iss": "urn:agent-workflow-service:local", "aud": "agent-workflow-service"}
        now = int(time.time())
        made = jwt.encode({**local, "sub": username, "iat": now, "exp": now + 12 * 3600}, key.read_text(), "EdDSA")
        with contextlib.suppress(requests.RequestException):
            if Client(f"{self.url}/api/v1", made, timeout=30).get("/me").status_code == 200:
                return made
        return None

    def session(self, username: str = "ada") -> Client:
        return Client(f"{self.url}/api/v1", self.token(username))

    def api_key(self, username: str = "ada") -> str:
        """The secret of an API key with the default scopes, created over HTTP. Each user has one."""
        if username not in self._keys:
            answer = self.session(username).post("/api-keys", json={"name": "stack"})
            assert answer.status_code == 201, answer.text
            self._keys[username] = answer.json()["secret"]
        return self._keys[username]

    def public(self, username: str = "ada") -> Client:
        return Client(f"{self.url}/api/public/v1", self.api_key(username))

    # --- observation -------------------------------------------------------------------------------------------------

    def wait_for(self, predicate: Callable[[], T], timeout: float = 60.0, what: str = "") -> T:
        """The first truthy value. Fails at once if a process of the stack ended unexpectedly."""

        def checked() -> T:
            for process in self.processes.values():
                process.check()
            return predicate()

        return wait_for(checked, timeout, what)

    def logs(self, name: str, lines: int = 60) -> str:
        return self.processes[name].tail(lines)

    def report(self) -> str:
        return "\n".join(f"--- {name}\n{process.tail()}" for name, process in self.processes.items())

    # --- details -----------------------------------------------------------------------------------------------------

    def _make_database(self) -> None:
        """Migrate once in each test process and give each stack a copy, which is much faster."""
        server = self.database_url or "sqlite"
        if server not in templates:
            if self.database_url:
                template = postgres.create_database(self.database_url)
                if dumps:
                    postgres.restore_database(template, dumps[0])
                else:
                    self.environment["DATABASE_URL"] = template
                    self.manage("migrate", "--verbosity", "0")
                    dumps.extend(filter(None, [postgres.dump_database(template)]))
                templates[server] = template
            else:
                path = temporary_directory("stack-template-") / "db.sqlite3"
                self.manage("migrate", "--verbosity", "0")
                for file in self.directory.glob("db.sqlite3*"):
                    shutil.copy(file, path.with_name(file.name))
                templates[server] = str(path)
        if self.database_url:
            name = templates[server].rpartition("/")[2]
            self.own_database = postgres.create_database(self.database_url, template=name)
            self.environment["DATABASE_URL"] = self.own_database
        else:
            for file in Path(templates[server]).parent.glob("db.sqlite3*"):
                shutil.copy(file, self.directory / file.name)


def is_ready(url: str) -> bool:
    """Whether a web or stream process answers at the URL and has its database and broker."""
    try:
        with requests.Session() as http:
            http.trust_env = False
            answer = http.get(f"{url}/readyz", timeout=10)
            return answer.status_code == 200 and answer.json()["status"] == "ok"
    except requests.RequestException:
        return False


def worker_is_ready(process: Process) -> bool:
    return process.log.exists() and " ready." in process.log.read_text(errors="replace")


def drop_templates() -> None:
    while templates:
        _, template = templates.popitem()
        if template.startswith("postgres"):
            # A template on the separate server of a test is gone with that server.
            with contextlib.suppress(psycopg.OperationalError):
                postgres.drop_database(template)
        else:
            remove_directory(Path(template).parent)
