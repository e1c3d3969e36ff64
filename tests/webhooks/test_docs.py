"""Tests that execute the snippets of docs/webhooks.md with real deliveries."""

import base64
import json
import re
from pathlib import Path

import pytest

from tests import node
from tests.webhooks.conftest import deliver, pass_time, record
from tests.webhooks.receiver import Received, answer
from webhooks import services
from webhooks.events import Event

pytestmark = pytest.mark.django_db
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "webhooks.md"


def snippet(kind: str) -> str:
    (found,) = re.findall(rf"^```{kind}\n(.*?)^```$", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE)
    return found


def test_table_of_events_matches_the_catalogue():
    rows = re.findall(r"^\| `(agent\.\w+|tool\.\w+)` \| (.*?) \| (.*?) ?\|$", DOCUMENT.read_text(), re.MULTILINE)
    assert [(name, sentence, re.findall(r"`(\w+)`", fields)) for name, sentence, fields in rows] == [
        (event, event.sent_when[0].lower() + event.sent_when[1:-1], list(event.fields)) for event in Event
    ]


@pytest.fixture
def deliveries(user, endpoint, receivers) -> tuple[list[Received], str, str]:
    """Two attempts of one event in the grace window, with the new secret and the previous secret."""
    receiver = receivers(answer(500))
    previous = endpoint.secret
    rotated, _ = services.register(user, receiver.url, rotate=True)
    record(user, "agent.failed", errorCode="MODEL_ERROR")
    deliver()
    pass_time(30)
    deliver()
    return receiver.requests, rotated.secret, previous


def test_python(deliveries):
    requests, secret, previous = deliveries
    scope: dict = {}
    exec(snippet("python"), scope)
    verify = scope["verify"]
    for request in requests:
        headers = dict(request.headers)
        assert verify(headers, request.body, [secret, previous])["errorCode"] == "MODEL_ERROR"
        for wrong in (
            lambda h=headers, r=request: verify(h, r.body + b" ", [secret, previous]),
            lambda h=headers, r=request: verify(h, r.body, ["00" * 32]),
            lambda h=headers, r=request: verify({**h, "X-Service-Timestamp": "1"}, r.body, [secret, previous]),
        ):
            with pytest.raises(ValueError, match=r"stale|bad"):
                wrong()
    assert verify(dict(requests[0].headers), requests[0].body, [secret])
    assert verify(dict(requests[1].headers), requests[1].body, [previous])


def test_python_with_the_library(deliveries):
    requests, secret, previous = deliveries
    for request in requests:
        for known in (secret, previous):
            scope = {"secret": known, "body": request.body, "headers": dict(request.headers)}
            exec(snippet("python library"), scope)
            assert scope["event"]["errorCode"] == "MODEL_ERROR"


CHECK = """
const cases = JSON.parse(require("node:fs").readFileSync(0, "utf8"));
const results = cases.map(({ headers, body, secrets }) => {
  try { return verify(headers, Buffer.from(body, "base64"), secrets).errorCode; }
  catch (error) { return error.message; }
});
console.log(JSON.stringify(results));
"""


# The service does not need Node.js, so these tests are in the group that needs more than Python.
@pytest.mark.services
def test_javascript(deliveries):
    requests, secret, previous = deliveries
    cases, expected = [], []

    def add(request: Received, secrets: list[str], outcome: str, body: bytes | None = None, **changes: str) -> None:
        headers = {name.lower(): value for name, value in request.headers}
        raw = base64.b64encode(request.body if body is None else body).decode()
        cases.append({"headers": {**headers, **changes}, "body": raw, "secrets": secrets})
        expected.append(outcome)

    for request in requests:
        add(request, [secret, previous], "MODEL_ERROR")
        add(request, ["00" * 32], "bad signature")
        add(request, [secret, previous], "bad signature", body=request.body + b" ")
        add(request, [secret, previous], "stale timestamp", **{"x-service-timestamp": "1"})
        add(request, [secret, previous], "stale timestamp", **{"x-service-timestamp": "x"})
        add(request, [secret, previous], "bad signature", **{"x-service-signature": "sha384="})
    assert json.loads(node.run("node", "-e", snippet("javascript") + CHECK, text=json.dumps(cases))) == expected


CHECK_LIBRARY = """
const cases = JSON.parse(require("node:fs").readFileSync(0, "utf8"));
const results = cases.map(({ headers, body: text, secret }) => {
  const body = Buffer.from(text, "base64");
  try { %s return event.errorCode; }
  catch (error) { return error.constructor.name; }
});
console.log(JSON.stringify(results));
"""


@pytest.mark.services
def test_javascript_with_the_library(deliveries):
    requests, secret, previous = deliveries
    required, use = snippet("javascript library").split("\n", 1)
    cases, expected = [], []
    for request in requests:
        for known, body, outcome in (
            (secret, request.body, "MODEL_ERROR"),
            (previous, request.body, "MODEL_ERROR"),
            ("00" * 32, request.body, "WebhookVerificationError"),
            (secret, request.body + b" ", "WebhookVerificationError"),
        ):
            raw = base64.b64encode(body).decode()
            cases.append({"headers": dict(request.headers), "body": raw, "secret": known})
            expected.append(outcome)
    said = node.run("node", "-e", required + CHECK_LIBRARY % use, text=json.dumps(cases))
    assert json.loads(said) == expected
