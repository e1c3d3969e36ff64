"""The official clients of AG-UI and CopilotKit, unmodified, against the service."""

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import pytest

from tests.clients.conftest import NpmFolder
from tests.stack.plugin import given_services
from tests.stack.stack import Stack

pytestmark = [pytest.mark.stack, pytest.mark.services, pytest.mark.timeout(600)]

CHART = '/call draw_chart {"title": "t", "series": [1, 2]}'
SUM = '/call calculate {"expression": "6*7"}'
YES = {"status": "resolved", "payload": {"approved": True}}
NO = {"status": "resolved", "payload": {"approved": False, "reason": "too dear"}}
SCRIPTS: dict[str, list[dict[str, Any]]] = {
    "text": [{"say": "/say One\n/stream 5 5"}, {"say": "/say Two"}],
    "tools": [{"say": f'/say Let me see\n{SUM}\n/call calculate {{"expression": "1/0"}}\n/say {{result}}'}],
    "yes": [{"say": f"/say One\n{CHART}\n/say Two"}, {"resume": YES}],
    "no": [{"say": f"/say One\n{CHART}\n/say Two"}, {"resume": NO}],
    "cancelled": [{"say": "/ask Which day?"}, {"resume": {"status": "cancelled"}}, {"say": "/say Two"}],
    "beside": [
        {"say": f"/say One\n{CHART}\n/say Two\n/ask Which day?\n/say Three"},
        {"say": "/say Four", "resume": YES},
        {"resume": {"status": "resolved", "payload": "Tuesday"}},
    ],
    "results": [{"say": f'/call pick {{"of": "colours"}}\n{CHART}\n/say {{result}}'}, {"resume": YES, "result": "red"}],
    "question": [
        {"say": "/ask Which day?\n/say So {result}"},
        {"resume": {"status": "resolved", "payload": "Tuesday"}},
    ],
    "client": [{"say": '/say One\n/call pick {"of": "colours"}\n/say {result}'}, {"result": "red"}],
    "flaky": [
        {"say": "/say Hello"},
        {"say": f"/say One\n{SUM}\n/stream 6 20\n/flaky 503 1 Two"},
        {"say": "/say Three"},
    ],
}
# These have each kind of frame, and their connection breaks after every second or third; that of the others in the
# middle of each step.
EVERY = {"beside": 2, "tools": 2, "flaky": 3}
PICK = {"name": "pick", "description": "Picks one.", "parameters": {"type": "object"}}
ENDS = {
    "yes": ["interrupt", "success"],
    "no": ["interrupt", "success"],
    "question": ["interrupt", "success"],
    "beside": ["interrupt", "interrupt", "success"],
    "results": ["interrupt", "success"],
    "cancelled": ["interrupt", "cancelled", "success"],
}


CREDITS = {"SIGNUP_CREDITS": "100000"}


@pytest.fixture(scope="module")
def given() -> Iterator[Stack]:
    with Stack(**given_services(), environment=CREDITS) as running:
        yield running


@pytest.fixture(scope="module")
def embedded() -> Iterator[Stack]:
    with Stack(environment=CREDITS) as running:
        yield running


@pytest.fixture
def service(request: pytest.FixtureRequest) -> Stack:
    """One of the two. A fixture of the module with a parameter would start one for most tests."""
    running: Stack = request.getfixturevalue(request.param)
    return running


def talk(service: Stack, npm: NpmFolder, steps: list[dict[str, Any]], **options: Any) -> list[dict[str, Any]]:
    """What the client has after each conversation; its messages are those of the chat."""
    url = f"{service.url}/api/v1/ag-ui/agents/default"
    job = {"url": url, "token": service.token("ada"), "steps": steps} | options
    said = json.loads(npm.run("node", "ag_ui.mjs", json.dumps(job)))
    for one in said:
        expected = messages_of(service, one["thread"])
        assert joined(one["messages"]) == expected, one
        assert joined(one.get("again", one["messages"])) == expected, one
    return said


def messages_of(service: Stack, thread: str) -> list[tuple[str, str]]:
    http = service.session()
    (chat,) = http.get("/chats", params={"clientId": thread}).json()["items"]
    rows = http.get(f"/chats/{chat['id']}/messages", params={"limit": 100}).json()["items"]
    return [(row["role"], row["content"]) for row in rows]


def joined(messages: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """The messages of people and the agent; each turn of an answer is a message of its own."""
    found: dict[str, tuple[str, str]] = {}
    for message in messages:
        if message["role"] in ("user", "assistant"):
            name, text = message["id"].partition(".")[0], message.get("content", "")
            before = found[name][1] if name in found else ""
            found[name] = message["role"], "\n\n".join(filter(None, [before, text]))
    return list(found.values())


@pytest.mark.parametrize(
    ("service", "name", "every"),
    [
        *(("given", name, EVERY.get(name, "middle")) for name in SCRIPTS),
        # What differs with the embedded broker and SQLite, such as wake-ups, shows in these.
        *(("embedded", name, "middle") for name in ("beside", "flaky")),
    ],
    indirect=["service"],
)
def test_the_client_has_the_messages_of_the_chat_wherever_its_connection_breaks(
    service: Stack, npm: NpmFolder, name: str, every: int | str
) -> None:
    whole, *others = talk(service, npm, SCRIPTS[name], tools=[PICK], every=every)
    assert whole["outcomes"] == ENDS.get(name, ["success"] * len(SCRIPTS[name]))
    assert ("MESSAGES_SNAPSHOT" in whole["types"]) == (name == "flaky")
    places = sum(whole["counts"]) - len(whole["counts"])
    assert len(others) == (math.ceil(places / every) if isinstance(every, int) else len(SCRIPTS[name]))


def test_the_client_has_the_whole_answer_of_a_worker_that_was_killed(make_stack: Any, npm: NpmFolder) -> None:
    with ThreadPoolExecutor() as threads:
        service = make_stack(environment={"RUN_LEASE_SECONDS": "2"})
        steps = [{"say": f"/say One\n{SUM}\n/stream 60 50\n/say Two"}]
        talking = threads.submit(talk, service, npm, steps, every=0)
        http = service.session()

        def streams() -> bool:
            runs = http.get("/runs").json()["items"]
            return bool(runs) and runs[0]["lastStreamIndex"] > 10

        service.wait_for(streams)
        service.kill("runs-1")
        service.restart("runs-1")
        (said,) = talking.result()
    assert "MESSAGES_SNAPSHOT" in said["types"]


@pytest.mark.parametrize(("service", "filtered"), [("given", False), ("embedded", True)], indirect=["service"])
def test_copilotkit_needs_no_runtime(service: Stack, npm: NpmFolder, filtered: bool) -> None:
    thread = str(uuid4())
    messages = [
        *("/say One", f"/say Two\n{CHART}\n/say Three", '/call pick {"of": "colours"}\n/say {result}'),
        *("/stream 6 20\n/flaky 503 1 Four", "/say Five"),
    ]
    job = {"url": f"{service.url}/api/v1/copilotkit", "token": service.token("ada"), "thread": thread}
    said = json.loads(npm.run("node", "copilotkit.mjs", json.dumps(job | {"messages": messages, "filtered": filtered})))
    expected = messages_of(service, thread)
    assert expected[5][1] == "red of colours"
    assert joined(said["messages"]) == joined(said["again"]) == expected
    assert (said["pending"], said["agents"]) == (["credit_approval"], ["default"])
