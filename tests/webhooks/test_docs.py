"""The snippets of docs/webhooks.md, each run on real deliveries."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.webhooks.conftest import deliver, pass_time, record
from tests.webhooks.receiver import Received, answer
from webhooks import services

pytestmark = pytest.mark.django_db
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "webhooks.md"


def snippet(kind: str) -> str:
    (found,) = re.findall(rf"^```{kind}\n(.*?)^```$", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE)
    return found


@pytest.fixture
def deliveries(user, endpoint, receivers) -> tuple[list[Received], str, str]:
    """Two attempts of one event in the grace window, the new secret and the previous one."""
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


# Node.js is no requirement of the service, so this runs with the tests that need more than Python.
@pytest.mark.services
def test_javascript(deliveries):
    node = shutil.which("node")
    assert node, "Node.js is not installed; it runs the JavaScript snippet of docs/webhooks.md"
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
    done = subprocess.run(
        [node, "-e", snippet("javascript") + CHECK],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == expected
