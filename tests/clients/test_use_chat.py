"""The AI SDK's own chat, versions 7 and 6, against the service: at the end it has what ``GET messages`` lists."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.conftest import NpmFolder
from tests.stack.plugin import given_services
from tests.stack.stack import Stack

pytestmark = [pytest.mark.stack, pytest.mark.services, pytest.mark.timeout(600)]

CHART = '/say Let me draw.\n/call draw_chart {"title": "Sales", "series": [1, 2]}\n/say It is {result}'
TOOLS = "\n".join(
    [
        '/call calculate {"expression": "1+1"}',
        '/call calculate {"expression": "2*"}',
        "/call nothing {}",
        "/say {result}",
    ]
)
LOCATE = {"clientTools": [{"name": "locate", "description": "Where", "inputSchema": {"type": "object"}}]}
# What is sent and answered, and the requests that this takes.
SCRIPTS: dict[str, tuple[dict[str, Any], int]] = {
    "text": ({"text": "/say Hello there"}, 1),
    "tools": ({"text": TOOLS}, 1),
    "approved": ({"text": CHART, "approved": True, "reason": "because"}, 2),
    "refused": ({"text": CHART, "approved": False}, 2),
    "question": ({"text": "/ask When?\n/say On {result}", "outputs": {"ask_user": "Tuesday"}}, 2),
    "two questions": (
        {"text": f"{CHART}\n/ask When?\n/say On {{result}}", "approved": True, "outputs": {"ask_user": "Tuesday"}},
        3,
    ),
    "client tool": (
        {
            "text": '/call locate {"of": "me"}\n/say You are at {result}',
            "run": LOCATE,
            "outputs": {"locate": {"lat": 48.2, "names": ["Vienna"]}},
        },
        2,
    ),
    "beside a job": (
        {"text": '/call long_job {"seconds": 2}\n' + CHART.splitlines()[1] + "\n/say {result}", "approved": True},
        2,
    ),
    "beside a client tool": (
        {
            "text": '/call locate {"of": "me"}\n' + CHART.splitlines()[1] + "\n/say {result}",
            "run": LOCATE,
            "outputs": {"locate": {"lat": 48.2}},
            "approved": True,
        },
        3,
    ),
    "beside a job and a client tool": (
        {
            "text": '/call locate {}\n/call long_job {"seconds": 2}\n' + CHART.splitlines()[1] + "\n/say {result}",
            "run": LOCATE,
            "outputs": {"locate": {"lat": 48.2}},
            "approved": True,
        },
        3,
    ),
    "question beside a client tool": (
        {
            "text": '/ask When?\n/call locate {"of": "me"}\n/say {result}',
            "run": LOCATE,
            "outputs": {"locate": 1, "ask_user": "Tuesday"},
        },
        2,
    ),
    "flaky": ({"text": "/say A\n/stream 20 20\n/flaky 503 1 after"}, 1),
}
# After how many chunks a stream breaks off: before the first one, after it, within a part, and late.
CUTS = {7: [0, 1, 4, 8], 6: [1, 5]}


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack(**given_services(), environment={"SIGNUP_CREDITS": "100000"}) as running:
        yield running


def chat(stack: Stack, npm: NpmFolder, plans: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What each client has at the end, by the id of its chat."""
    order = {"url": f"{stack.url}/api/v1", "token": stack.token("ada"), "plans": plans}
    return {said["id"]: said for said in json.loads(npm.run("node", "use_chat.mjs", json.dumps(order)))}


def without(message: dict[str, Any], *names: str) -> dict[str, Any]:
    """The message, and its approvals without some of their members: version 6 does not know why it is asked, and a
    stream from the beginning shows no question that is answered.
    """
    parts = []
    for part in message["parts"]:
        approval = part.get("approval") if "approval" not in names else None
        kept = {name: value for name, value in part.items() if name != "approval"}
        if approval:
            kept["approval"] = {name: value for name, value in approval.items() if name not in names}
        parts.append(kept)
    return message | {"parts": parts}


@pytest.mark.parametrize("version", [7, 6])
def test_scripts(stack: Stack, npm: NpmFolder, version: int) -> None:
    plans = [{"version": version, "id": f"{name} {version}", **plan} for name, (plan, _) in SCRIPTS.items()]
    said = chat(stack, npm, plans)
    for name, (_, requests) in SCRIPTS.items():
        got = said[f"{name} {version}"]
        assert "message" in got, got
        assert without(got["message"], *(["requestReason"] if version == 6 else [])) == (
            without(got["listed"], *(["requestReason"] if version == 6 else []))
        ), name
        assert got["listed"]["metadata"]["status"] == "completed"
        if (name, version) == ("flaky", 6):
            # It does not know `reset-step`, so it asks for the whole stream again.
            assert got["requests"][0] == "POST 200"
            assert got["requests"][1].startswith("GET ")
            continue
        assert (got["requests"], got["errors"]) == (["POST 200"] * requests, []), name


@pytest.mark.parametrize("reload", [True, False])
def test_a_stream_that_breaks_off_anywhere(stack: Stack, npm: NpmFolder, reload: bool) -> None:
    plans = [
        {
            "version": version,
            "id": f"{name} {version} {cut} {reload}",
            "cutAfter": cut,
            "reload": reload,
            **SCRIPTS[name][0],
        }
        for name in ("text", "approved", "question", "client tool", "flaky")
        for version, cuts in CUTS.items()
        for cut in cuts
    ]
    for name, got in chat(stack, npm, plans).items():
        assert without(got["message"], "approval") == without(got["listed"], "approval"), name


def test_two_tabs(stack: Stack, npm: NpmFolder) -> None:
    plans = [{"version": 7, "id": "tabs", "text": "/stream 60 30", "watched": True}]
    got = chat(stack, npm, plans)["tabs"]
    assert got["watched"] == got["message"] == got["listed"]


@pytest.mark.parametrize("version", [7, 6])
def test_stop(stack: Stack, npm: NpmFolder, version: int) -> None:
    plans = [{"version": version, "id": f"stop {version}", "text": "/stream 500 20", "stop": True}]
    got = chat(stack, npm, plans)[f"stop {version}"]
    assert (got["requests"], got["errors"], got["counts"]) == (["POST 200"], [], [2, 2])
    assert got["message"]["parts"] == got["listed"]["parts"]
    http = stack.session()
    (known,) = http.get("/chats", params={"clientId": f"stop {version}"}).json()["items"]
    (run,) = http.get(f"/chats/{known['id']}/runs").json()["items"]
    assert run["status"] == "cancelled"


@pytest.mark.parametrize("version", [7, 6])
def test_regenerate(stack: Stack, npm: NpmFolder, version: int) -> None:
    plan = {"version": version, "text": "/stream 20 10", "regenerate": 2}
    plans = [plan | {"id": f"{twice} {version}", "twice": twice} for twice in (True, False)]
    for name, got in chat(stack, npm, plans).items():
        assert got["errors"] == [], name
        assert got["counts"] == [2, 2], name
        assert got["message"] == got["listed"], name
        assert got["requests"] == ["POST 200"] * (5 if name.startswith("True") else 3), name
