"""Load for fault tests: a user starts runs of every kind, a thread answers them, and receivers count their requests.

``Load.check`` requires the same after every fault: each accepted run ended as its script says, each call to a server
outside happened once, the credits add up, and no invariant is violated.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import psycopg
import requests
from celery import Celery

from tests.driver import FINAL, Driver, Http
from tests.stack.plugin import given_services
from tests.stack.stack import Client, Stack
from tests.webhooks.receiver import Received, Receiver, answer, receiving

SIGNUP_CREDITS = 100_000
# These limits have the proportions of production, but are short enough that tests wait only seconds.
QUICK = {
    "SIGNUP_CREDITS": str(SIGNUP_CREDITS),
    "RUN_LEASE_SECONDS": "2",
    "config.settings.RUN_SWEEP_SECONDS": "0.5",
    "RUN_SHUTDOWN_GRACE_SECONDS": "3",
    "config.settings.WEBHOOK_SWEEP_SECONDS": "0.5",
    "config.settings.WEBHOOK_ATTEMPT_TIMEOUT_SECONDS": "3",
    "webhooks.transitions.WEBHOOK_CLAIM_MARGIN_SECONDS": "1",
    "config.api.idempotency.IDEMPOTENCY_LOCK_SECONDS": "2",
    "config.settings.DATABASE_IDLE_TRANSACTION_SECONDS": "2",
}
# Runs do without them, and webhooks unless their own worker or the broker fails, so other tests save their start and
# their sweeps.
NOT_NEEDED = ("maintenance", "beat")
RUNS_ALONE = ("webhooks", *NOT_NEEDED)
# The process id of a run's owner.
OWNER = "SELECT w.pid FROM runs_worker w JOIN runs_run r ON r.worker_id = w.id WHERE r.id = %s"
CATALOGUE = """
from runs.models import Tool
for name, repeatable in (("look_up", True), ("book", False)):
    Tool.objects.update_or_create(name=name, defaults={{
        "display_name": name, "description": name, "node_type": "http", "price": 2_000_000, "approval": "never",
        "repeatable": repeatable, "url": "{url}", "timeout_seconds": 120,
        "input_schema": {{"type": "object", "properties": {{}}}},
    }})
Tool.objects.filter(name="ask_user").update(price=2_000_000)
"""
CHECK = """
from django.core.management import call_command
call_command("check_invariants")
call_command("reconcile_credits")
"""


@dataclass(frozen=True)
class Kind:
    """A script, the end of its text if every call succeeds, and its final status."""

    script: str
    ending: str = ""
    status: str = "completed"


PLAIN = Kind("Hello")
TOOLS = Kind(
    '/call calculate {"expression": "6*7"}\n/call calculate {"expression": "1/0"}\n/say on\n'
    '/call calculate {"expression": "2+2"}\n/say It is {result}.',
    "It is 4.",
)
STREAM = Kind("/stream 18 50\n/say and the end", "and the end")
OUTSIDE = Kind("/call look_up {}\n/call book {}\n/say booked\n/call book {}\n/say done", "done")
APPROVAL = Kind('/say A chart?\n/call draw_chart {"title": "T", "series": [3, 1, 4]}\n/say drawn', "drawn")
QUESTION = Kind("/ask Which?\n/say {result} it is", "blue it is")
FAILING = Kind("/say so far\n/fail broken", status="failed")
MIX = (PLAIN, TOOLS, OUTSIDE, APPROVAL, STREAM, QUESTION, FAILING)


def slow_result(receiver: Receiver, connection: socket.socket, request: Received) -> None:
    """The response of the tools outside. The delay lets a fault occur during the call."""
    time.sleep(0.15)
    answer(200, b'{"result": "ok"}')(receiver, connection, request)


class Careful:
    """A careful client, for ``Driver``: it repeats a request that got no response, or one by which the service may
    refuse while the database is down. The repetitions of a POST have one Idempotency-Key.
    """

    def __init__(self, http: Client) -> None:
        self.http = http

    def get(self, path: str) -> requests.Response:
        return self._repeated(lambda: self.http.get(path), f"GET {path}")

    def post(self, path: str, json: Any = None) -> requests.Response:
        headers = {"Idempotency-Key": uuid.uuid4().hex}
        return self._repeated(lambda: self.http.post(path, json, headers=headers), f"POST {path}")

    def _repeated(self, send: Callable[[], requests.Response], what: str) -> requests.Response:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(requests.RequestException):
                answered = send()
                if not is_excused(answered):
                    return answered
            assert time.monotonic() < deadline, f"{what} was not accepted in 60 s"
            time.sleep(0.1)


def require_correct_data(stack: Stack) -> None:
    """No invariant is violated, and the accounts are what the ledger says. One command saves the start of another."""
    stack.manage("shell", "--no-imports", "-c", CHECK)


def is_excused(answered: requests.Response) -> bool:
    """Whether the service may give this response while the database is down."""
    try:
        code = answered.json()["error"]["code"]
    except (ValueError, KeyError, TypeError):
        return False
    return (answered.status_code, code) in {(503, "UNAVAILABLE"), (409, "IDEMPOTENCY_KEY_IN_USE")}


class Load:
    """One user of a stack. Use as a context manager: a thread answers the waiting runs until the end."""

    def __init__(self, stack: Stack, tools: Receiver, user: str = "load") -> None:
        self.stack, self.tools, self.user = stack, tools, user
        self.hooks = Receiver([answer()])
        self.runs: dict[str, Kind] = {}
        self.wrong: list[str] = []
        self.slowest_start = 0.0
        self.started: list[Callable[[str], None]] = []
        self._stopped = threading.Event()
        self._answering = threading.Thread(target=self._answer, daemon=True)

    def __enter__(self) -> Load:
        self.http = self.stack.session(self.user)
        self.careful = Careful(self.http)
        self.driver = Driver(self.careful)
        answered = self.http.post("/webhooks", {"url": self.hooks.url})
        assert answered.status_code == 200, answered.text
        # The invariants do not require deliveries for runs that start within one second after the endpoint.
        time.sleep(1)
        self._answering.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._answering.join(30)
        self.hooks.stop()

    # --- the user's actions ------------------------------------------------------------------------------------------

    def start(self, kind: Kind, **body: Any) -> str:
        """Start a run in a new chat. Repeat the request until it is accepted."""
        chat = self._insist("/chats", {})["id"]
        run_id = str(self._insist(f"/chats/{chat}/runs", {"message": kind.script} | body, timed=True)["id"])
        self.runs[run_id] = kind
        for listener in self.started:
            listener(run_id)
        return run_id

    def start_all(self, *kinds: Kind) -> list[str]:
        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(self.start, kinds))

    @contextlib.contextmanager
    def going(self, runs: int, seconds: float) -> Iterator[None]:
        """Start ``runs`` runs of the mix in the background, spread over ``seconds``. All have started at the end."""
        starting = ThreadPoolExecutor(8)
        begun = time.monotonic()

        def start(number: int) -> None:
            time.sleep(max(0.0, begun + number * seconds / runs - time.monotonic()))
            self.start(MIX[number % len(MIX)])

        futures = [starting.submit(start, number) for number in range(runs)]
        try:
            yield
            for future in futures:
                future.result(timeout=90)
        finally:
            starting.shutdown(wait=False, cancel_futures=True)

    def _insist(self, path: str, body: dict[str, Any], *, timed: bool = False) -> dict[str, Any]:
        answered = self.careful.post(path, body)
        if answered.status_code != 201:
            self._note(answered)
            raise AssertionError(f"POST {path}: {answered.status_code} {answered.text}")
        if timed:
            self.slowest_start = max(self.slowest_start, answered.elapsed.total_seconds())
        return dict(answered.json())

    def _note(self, answered: requests.Response) -> None:
        """``check`` reports a response that the service may not even give while the database is down."""
        if not is_excused(answered):
            self.wrong.append(f"{answered.request.method} {answered.url}: {answered.status_code} {answered.text[:300]}")

    def _answer(self) -> None:
        while not self._stopped.wait(0.2):
            with contextlib.suppress(requests.RequestException):
                found = self.http.get("/runs?status=waiting&limit=100")
                if found.status_code != 200:
                    self._note(found)
                    continue
                for run in found.json()["items"]:
                    if (waitpoint := run["pendingWaitpoint"]) is not None:
                        self.respond(waitpoint, self.http)  # the next look repeats it

    def respond(self, waitpoint: dict[str, Any], http: Http | None = None) -> None:
        body: dict[str, Any] = {"kind": waitpoint["kind"]}
        body |= {"answer": "blue"} if waitpoint["kind"] == "CLARIFICATION" else {"approved": True}
        answered = (http or self.careful).post(f"/waitpoints/{waitpoint['id']}/respond", body)
        if answered.status_code != 200:
            self._note(answered)

    def nobody_answers(self) -> None:
        """Stop the automatic answers: from now on a run waits until the test responds."""
        self._stopped.set()
        self._answering.join()

    # --- checks at the end -------------------------------------------------------------------------------------------

    def settle(self, timeout: float = 60) -> dict[str, dict[str, Any]]:
        """Wait until all runs have ended and all webhooks are delivered. Returns the runs by id."""
        ended: dict[str, dict[str, Any]] = {}

        def all_ended() -> bool:
            for run_id in [run_id for run_id in self.runs if run_id not in ended]:
                run = self.driver.get(run_id)
                if run["status"] not in FINAL:
                    return False
                ended[run_id] = run
            return True

        try:
            self.stack.wait_for(all_ended, timeout, "the end of all runs")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.live()}") from None
        pending = lambda: self.careful.get("/webhooks/deliveries?status=PENDING").json()["items"]  # noqa: E731
        self.stack.wait_for(lambda: not pending(), timeout, "the delivery of all webhooks")
        return ended

    def check(self, timeout: float = 60) -> None:
        ended = self.settle(timeout)
        assert self.wrong == []
        for run_id, run in ended.items():
            kind = self.runs[run_id]
            assert run["status"] == kind.status, run
            if all(call["errorCode"] in (None, "TOOL_ERROR") for call in run["toolInvocations"]):
                assert self.driver.content(run).endswith(kind.ending), run
            for call in run["toolInvocations"]:
                assert call["status"] in ("COMPLETED", "FAILED"), call
                # A call has an unknown outcome only if its worker died during the call.
                assert call["errorCode"] in (None, "TOOL_ERROR", "OUTCOME_UNKNOWN"), call
        self._check_outside(ended)
        self._check_credits(ended)
        require_correct_data(self.stack)

    def _check_outside(self, ended: dict[str, dict[str, Any]]) -> None:
        made = Counter(request.header("Idempotency-Key") for request in list(self.tools.requests))
        for run in ended.values():
            for call in run["toolInvocations"]:
                if call["name"] == "book":
                    least = 1 if call["status"] == "COMPLETED" else 0
                    assert least <= made[call["id"]] <= 1, (call, made[call["id"]])
                elif call["name"] == "look_up":
                    assert made[call["id"]] >= 1, call
        received: dict[tuple[str, str], set[str]] = {}
        for request in list(self.hooks.requests):
            body = json.loads(request.body)
            received.setdefault((body["runId"], body["type"]), set()).add(body["id"])
        for run_id, run in ended.items():
            events = {event_type: len(received.get((run_id, event_type), ())) for event_type in EVENT_TYPES}
            completed = sum(call["status"] == "COMPLETED" for call in run["toolInvocations"])
            asked = sum(call["name"] in ("draw_chart", "ask_user") for call in run["toolInvocations"])
            assert events == {
                "agent.started": 1 + asked,
                "agent.completed": int(run["status"] == "completed"),
                "agent.failed": int(run["status"] == "failed"),
                "tool.completed": completed,
            }, run

    def _check_credits(self, ended: dict[str, dict[str, Any]]) -> None:
        now = self.driver.credits()
        spent = sum(round(run["totalCreditsUsed"] * 1_000_000) for run in ended.values())
        assert now["held"] == "0"
        assert round(float(now["balance"]) * 1_000_000) == SIGNUP_CREDITS * 1_000_000 - spent

    # --- observation -------------------------------------------------------------------------------------------------

    def live(self) -> list[tuple[Any, ...]]:
        return self.sql(
            "SELECT id, status, blocked, throttled, worker_id, lease_token, lease_losses, due_at, now() FROM runs_run "
            "WHERE status IN ('queued', 'running', 'waiting')"
        )

    def sql(self, query: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Query data that the API does not show."""
        with psycopg.connect(self.stack.environment["DATABASE_URL"], autocommit=True) as connection:
            return connection.execute(query, parameters).fetchall()

    def footprint(self) -> dict[str, Any]:
        """Everything that the worker of a run writes, charges or sends."""
        counted = {
            table: self.sql(f"SELECT count(*) FROM {table}")[0][0]
            for table in (
                "runs_runevent",
                "runs_turn",
                "runs_toolinvocation",
                "runs_waitpoint",
                "credits_ledgerentry",
                "webhooks_delivery",
                "chats_message",
            )
        }
        ended = self.sql("SELECT id, status, lease_token, lease_losses, last_stream_index, updated_at FROM runs_run")
        sent = Counter(json.loads(request.body)["id"] for request in list(self.hooks.requests))
        return counted | {"runs": sorted(ended), "tools": len(self.tools.requests), "webhooks": sent}

    def broker(self) -> Celery:
        """A Celery app that publishes messages as the service does."""
        return Celery("tests", broker=self.stack.environment["REDIS_URL"], set_as_current=False)


@contextlib.contextmanager
def at_work(kind: type[Stack] = Stack, **options: Any) -> Iterator[Load]:
    """A service with two run workers, and the load of one user. ``options`` are those of ``kind``."""
    with receiving(slow_result) as tools:
        prepared = {"run_workers": 2, "environment": QUICK, "prepare": CATALOGUE.format(url=tools.url)}
        with kind(**{**given_services(), **prepared, **options}) as stack, Load(stack, tools) as load:
            yield load


EVENT_TYPES = ("agent.started", "agent.completed", "agent.failed", "tool.completed")
