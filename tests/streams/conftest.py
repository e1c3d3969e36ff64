"""Fixtures with runs whose stream events are in the database, and clients of the streams."""

import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import httpx
import pytest
from httpx_sse import ServerSentEvent, connect_sse

from chats.models import Chat
from chats.services import add_message, write_content
from config.database.writes import Writes
from config.kernel import clock
from config.kernel.ids import first_id, new_id
from runs import events
from runs.lifecycle.moves import new_events
from runs.models import FINAL_RUN_STATUSES, Run, RunEvent, RunStatus
from tests.factories import force_update
from tests.stack.plugin import given_services
from tests.stack.process import free_port, python
from tests.stack.stack import Stack


def append(run: Run, *happened: tuple[str, dict[str, Any]], status: str | None = None) -> None:
    """Write events like a transition, but without the wake-up of the streams."""
    ends = status in FINAL_RUN_STATUSES
    RunEvent.objects.bulk_create(new_events(run, happened, clock.now(), ends=ends))
    run.last_stream_index += len(happened)
    force_update(
        Run.objects.filter(pk=run.pk),
        last_stream_index=run.last_stream_index,
        status=status or run.status,
        finished_at=clock.now() if ends else None,
    )
    run.refresh_from_db()


def finish(run: Run, *deltas: str, status: str = RunStatus.COMPLETED) -> None:
    append(run, *(events.message_delta(text) for text in deltas))
    content = "".join(deltas)
    if content:
        writes = Writes()
        write_content(writes, run.assistant_message_id, content)
        writes.do()
        append(run, events.message_completed(run, content))
    run.status = status
    append(run, events.run_status(run), status=status)


@pytest.fixture
def make_run() -> Callable[..., Run]:
    def make(user: Any, days: int = 0) -> Run:
        """Make a running run of ``days`` ago with two events: queued and running."""
        chat = Chat.objects.create(user=user)
        made = first_id("run", clock.now() - timedelta(days=days))
        run = Run(id=made + new_id("run")[len(made) :], chat=chat, user=user, status=RunStatus.RUNNING)
        writes = Writes()
        run.user_message_id = add_message(writes, chat.pk, run.pk, "user", clock.now(), content="Hello").pk
        run.assistant_message_id = add_message(writes, chat.pk, run.pk, "assistant", clock.now()).pk
        writes.do()
        run.save(force_insert=True)
        queued = Run(id=run.id, chat=chat, status=RunStatus.QUEUED)
        append(run, events.run_status(queued), events.run_status(run))
        return run

    return make


def parse(body: bytes) -> list[tuple[int | None, str, dict[str, Any]]]:
    """Return a stream's events as (id or None, event, data)."""
    found = []
    for block in body.decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if fields:
            found.append((int(fields["id"]) if "id" in fields else None, fields["event"], json.loads(fields["data"])))
    return found


def text_of(received: list[Any]) -> str:
    """Return the message text that a client assembles from (…, event, data)."""
    text = ""
    for *_, kind, data in received:
        text = "" if kind == "message.reset" else text + data["text"] if kind == "message.delta" else text
    return text


class Listener:
    """A client that reads a user's streams from one surface of one server."""

    def __init__(self, base: str, credential: str) -> None:
        self.base = base
        self.headers = {"Authorization": f"Bearer {credential}"}

    def listen(self, run_id: str, after: int | None = None, timeout: float = 30) -> Iterator[ServerSentEvent]:
        """Yield the events, parsed by httpx-sse, until the stream ends."""
        headers = self.headers | ({} if after is None else {"Last-Event-ID": str(after)})
        url = f"{self.base}/runs/{run_id}/stream"
        with (
            httpx.Client(timeout=timeout, trust_env=False) as http,
            connect_sse(http, "GET", url, headers=headers) as source,
        ):
            assert source.response.status_code == 200, source.response.read()
            yield from source.iter_sse()

    def all(self, run_id: str, after: int | None = None) -> list[tuple[int, str, dict[str, Any]]]:
        return [(int(event.id), event.event, event.json()) for event in self.listen(run_id, after)]


# Both processes run the same program, so most tests need only one of them.
SERVERS = ("web", "stream")
STREAM_CONNECTIONS = 4  # the places of the stream process
# Run workers sweep for themselves.
NOT_NEEDED = ("webhooks", "maintenance", "beat")


class StreamStack(Stack):
    """A stack with a web process and a stream process."""

    def start_processes(self) -> None:
        super().start_processes()
        self.stream_port = free_port()
        own = {"PORT": str(self.stream_port), "WEB_THREADS": "4"}
        self.process_environment["stream"] = {**self.process_environment.get("stream", {}), **own}
        self.add("stream", python("-m", "config.serve", "--host", "127.0.0.1", "--name", "stream"))
        self.wait_for(self.stream_answers, 60, "the stream process's readiness")

    @property
    def stream_url(self) -> str:
        return f"http://127.0.0.1:{self.stream_port}"

    def stream_answers(self) -> bool:
        try:
            return httpx.get(f"{self.stream_url}/livez", timeout=10, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    def listener(self, server: str, user: str = "ada", surface: str = "session") -> Listener:
        base = {"web": self.url, "stream": self.stream_url}[server]
        if surface == "session":
            return Listener(f"{base}/api/v1", self.token(user))
        return Listener(f"{base}/api/public/v1", self.api_key(user))


# Text that fills the buffers of a connection.
LONG_ANSWERS = """
from runs.models import AgentModel
AgentModel.objects.filter(name="demo").update(max_output_tokens=100_000)
"""
SHORT = {
    "runs.streams.hub.STREAM_HEARTBEAT_SECONDS": "0.5",
    "runs.streams.hub.STREAM_AUTH_SECONDS": "0.5",
    "STREAM_STALL_SECONDS": "1",
    "STREAMS_PER_USER": "25",
    "RUN_LEASE_SECONDS": "2",
    "config.settings.RUN_SWEEP_SECONDS": "0.5",
    "DEBUG": "0",
    "PLAYGROUND": "1",
    "PLAYGROUND_STAFF_ONLY": "0",
}


@pytest.fixture(scope="module")
def streams() -> Iterator[StreamStack]:
    with StreamStack(
        **given_services(),
        environment=SHORT,
        process_environment={"stream": {"STREAM_CONNECTIONS_MAX": str(STREAM_CONNECTIONS)}},
        prepare=LONG_ANSWERS,
        without=NOT_NEEDED,
    ) as running:
        running.token("ada")
        running.manage("grant_credits", "ada", "100000", "--reason", "tests")
        yield running
