"""One user's slow tools and files at their limits, and another user beside on the same worker, who stays as fast."""

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.driver import Driver
from tests.faults.load import QUICK, RUNS_ALONE, require_correct_data
from tests.http_server import serving
from tests.stack.plugin import given_services
from tests.stack.process import Process, free_port, python
from tests.stack.stack import Stack
from tests.webhooks.receiver import Receiver, answer, hang, receiving

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.services, pytest.mark.timeout(240)]

CATALOGUE = """
from runs.models import Tool
for name, url in (("stuck", "{stuck}"), ("quick", "{quick}")):
    Tool.objects.create(
        name=name, display_name=name, description=name, node_type="http", price=0, approval="never", repeatable=True,
        url=url, timeout_seconds=60, input_schema={{"type": "object", "properties": {{}}}},
    )
"""
CALLS_AT_WORK = 32
SAMPLES = 10
# On a loaded machine, a difference below this is no sign of a queue.
FLOOR_SECONDS = 0.5
# Of a worker: Celery's, the database's, CPU and files, loops, heartbeat and publisher. Calls at work need none.
THREADS_MAX = 60


class Users:
    """A greedy and a modest user of a stack with one run worker."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.greedy = Driver(stack.session("greedy"))
        self.modest = Driver(stack.session("modest"))

    def slowest(self, script: str, *bodies: dict[str, Any]) -> float:
        """The p99 of so few samples is their maximum. In seconds, of a whole run of the modest user."""
        seconds = []
        for body in bodies or [{}] * SAMPLES:
            begun = time.monotonic()
            run = self.modest.wait(self.modest.start(script, **body)["id"])
            seconds.append(time.monotonic() - begun)
            assert run["status"] == "completed", run
            assert all(call["status"] == "COMPLETED" for call in run["toolInvocations"]), run
        return max(seconds)

    def threads(self) -> int:
        status = Path(f"/proc/{self.stack.processes['runs-1'].pid}/status").read_text()
        return int(status.partition("Threads:")[2].split()[0])


@pytest.fixture(scope="module")
def stuck() -> Iterator[Receiver]:
    with receiving(hang) as receiver:
        yield receiver


@pytest.fixture(scope="module")
def users(stuck: Receiver) -> Iterator[Users]:
    with receiving(answer(200, b'{"result": "ok"}')) as quick:
        catalogue = CATALOGUE.format(stuck=stuck.url, quick=quick.url)
        with Stack(**given_services(), environment=QUICK, prepare=catalogue, without=RUNS_ALONE) as stack:
            yield Users(stack)


def test_calls_to_a_stuck_endpoint_do_not_delay_another_users_calls(users: Users, stuck: Receiver) -> None:
    script = '/call quick {}\n/call calculate {"expression": "6*7"}\n/say done'
    users.slowest(script, {}, {}, {})
    alone = users.slowest(script)
    greedy = [users.greedy.start("\n".join(["/call stuck {}"] * 64))["id"] for _ in range(2)]
    users.stack.wait_for(lambda: stuck.under_way >= CALLS_AT_WORK, what="the greedy user's calls")
    assert users.slowest(script) <= alone * 2 + FLOOR_SECONDS
    assert users.threads() <= THREADS_MAX
    assert stuck.most_under_way == CALLS_AT_WORK
    for run_id in greedy:
        users.greedy.cancel(run_id)
    for run_id in greedy:
        assert users.greedy.wait(run_id, timeout=20)["status"] == "cancelled"
    require_correct_data(users.stack)


def test_pages_that_take_long_to_read_do_not_delay_another_users_calls(users: Users) -> None:
    script = '/call quick {}\n/call calculate {"expression": "6*7"}\n/say done'
    users.slowest(script, {}, {}, {})
    alone = users.slowest(script)
    page = answer(200, b"<b>" * 349_000, "Content-Type: text/html\r\n")
    with receiving(page) as pages:
        fetch = f'/call web_fetch {{"url": "{pages.url}"}}'
        greedy = [users.greedy.start("\n".join([fetch] * 64))["id"] for _ in range(2)]
        users.stack.wait_for(lambda: pages.requests, what="the greedy user's calls")
        assert users.slowest(script) <= alone * 2 + FLOOR_SECONDS
        assert users.threads() <= THREADS_MAX
        assert "running" in {users.greedy.get(run_id)["status"] for run_id in greedy}
        for run_id in greedy:
            users.greedy.cancel(run_id)
            assert users.greedy.wait(run_id, timeout=20)["status"] == "cancelled"


# --- attachments -----------------------------------------------------------------------------------------------------
MODEL = """
from runs.models import AgentModel, Provider
AgentModel.objects.create(
    name="reader", display_name="Reader", provider=Provider.objects.get(name="openai"),
    provider_model="text=read", price_in=0, price_out=0,
)
"""
FILE_THREADS = 8
RUNS = 20


class Storage:
    """An S3-compatible storage in memory. Reads of the files of ``stuck`` attachments are never answered."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.stuck: set[str] = set()
        self.reads = 0
        self.stopped = threading.Event()

    def handler(self) -> type[BaseHTTPRequestHandler]:
        storage = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_PUT(self) -> None:
                storage.files[self.key] = self.rfile.read(int(self.headers["Content-Length"]))
                self.answer(200)

            def do_GET(self) -> None:
                if any(attachment in self.path for attachment in storage.stuck):
                    storage.reads += 1
                    storage.stopped.wait(120)
                elif "list-type" in self.path:
                    self.answer(200, b"<ListBucketResult/>")
                elif (content := storage.files.get(self.key)) is None:
                    self.answer(404)
                else:
                    self.answer(206 if "Range" in self.headers else 200, content)

            do_HEAD = do_GET

            def do_DELETE(self) -> None:
                storage.files.pop(self.key, None)
                self.answer(204)

            @property
            def key(self) -> str:
                return self.path.partition("?")[0]

            def answer(self, status: int, content: bytes = b"") -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.send_header("ETag", '"made-up"')
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            def log_message(self, *args: Any) -> None:
                pass

        return Handler


@pytest.fixture
def storage() -> Iterator[tuple[Storage, str]]:
    made = Storage()
    with serving(made.handler()) as url:
        yield made, url
        made.stopped.set()


@pytest.fixture
def readers(storage: tuple[Storage, str], tmp_path: Path) -> Iterator[Users]:
    """Two users of a model that reads files."""
    port = free_port()
    model = Process("model", python("-m", "tests.llm.model_server", "--port", str(port)), log=tmp_path / "log")
    model.start()
    environment = QUICK | {
        "OPENAI_BASE_URL": f"http://127.0.0.1:{port}",
        "OPENAI_API_KEY": "made-up",
        "STORAGE_S3_BUCKET": "files",
        "STORAGE_S3_ENDPOINT": storage[1],
        "STORAGE_S3_ACCESS_KEY": "made-up",
        "STORAGE_S3_SECRET_KEY": "made-up",
        "STORAGE_S3_ADDRESSING": "path",
        "config.storage.STORAGE_S3_TIMEOUT_SECONDS": "30",
        "runs.engine.process.RUN_WORKER_TOOL_THREADS": str(FILE_THREADS),
        "runs.engine.process.RUN_WORKER_FILE_THREADS": str(FILE_THREADS),
    }
    try:
        with Stack(**given_services(), environment=environment, prepare=MODEL, without=RUNS_ALONE) as stack:
            yield Users(stack)
    finally:
        model.kill()


def attached(user: Driver) -> dict[str, Any]:
    """The body of a run with a new attachment."""
    body = {"fileName": "a.txt", "contentType": "text/plain", "sizeBytes": 5}
    made = user.http.post("/attachments", body).json()
    requests.put(made["upload"]["url"], b"Hello", headers=made["upload"]["headers"], timeout=10).raise_for_status()
    assert user.http.post(f"/attachments/{made['id']}/complete").json()["status"] == "READY"
    return {"attachmentIds": [made["id"]], "model": "reader"}


def test_files_that_hang_do_not_delay_another_users_files(readers: Users, storage: tuple[Storage, str]) -> None:
    hanging = [attached(readers.greedy) for _ in range(RUNS)]
    alone = readers.slowest("Look", *[attached(readers.modest) for _ in range(SAMPLES)])
    bodies = [attached(readers.modest) for _ in range(SAMPLES)]
    storage[0].stuck.update(attachment for body in hanging for attachment in body["attachmentIds"])
    greedy = [readers.greedy.start("Look", **body)["id"] for body in hanging]
    readers.stack.wait_for(lambda: storage[0].reads, what="a read that hangs")
    assert readers.slowest("Look", *bodies) <= alone * 2 + FLOOR_SECONDS
    assert readers.threads() <= THREADS_MAX
    for run_id in greedy:
        readers.greedy.cancel(run_id)
    for run_id in greedy:
        assert readers.greedy.wait(run_id, timeout=20)["status"] == "cancelled"
    require_correct_data(readers.stack)
