"""Tests of ``manage.py webhook_listen`` in a separate process."""

import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path

import pytest

from tests import factories
from tests.webhooks.conftest import deliver, record
from webhooks import services, signing
from webhooks.models import Delivery

ROOT = Path(__file__).resolve().parents[2]


class Listener:
    def __init__(self, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "manage.py", "webhook_listen", "--port", "0", *options],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            # Background processes of a shell ignore SIGINT, and their children inherit that.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
        self.url = self.line().split()[2]

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def interrupt(self) -> int:
        self.process.send_signal(signal.SIGINT)
        _, errors = self.process.communicate(timeout=20)
        assert "Traceback" not in errors
        return self.process.returncode


@pytest.fixture
def listen():
    started = []

    def start(*options: str) -> Listener:
        started.append(Listener(*options))
        return started[-1]

    yield start
    for listener in started:
        if listener.process.poll() is None:
            listener.process.kill()
        listener.process.communicate()


@pytest.mark.django_db
def test_verifies_and_prints_real_deliveries(user, listen):
    secret = "5a" * 32
    listener = listen("--secret", secret)
    factories.EndpointFactory(user=user, url=listener.url, secret=secret)
    delivery = record(user, "tool.completed", name="calculate")
    deliver()
    line = listener.line()
    for part in ("tool.completed", delivery.run_id, "name=calculate", "attempt 1", "verified"):
        assert part in line
    assert "not verified" not in line
    services.send_test(user)
    deliver()
    assert re.search(r"webhook\.test +\(attempt 1, verified\)$", listener.line())
    delivery.refresh_from_db()
    assert delivery.status == "DELIVERED"
    assert listener.interrupt() == 0


@pytest.mark.django_db
def test_refuses_a_delivery_signed_with_another_secret(user, listen):
    listener = listen("--secret", "00" * 32)
    factories.EndpointFactory(user=user, url=listener.url)
    record(user)
    deliver()
    assert "REFUSED  X-Service-Signature does not match" in listener.line()
    assert Delivery.objects.get().attempts.get().status_code == 400


@pytest.mark.django_db
def test_without_a_secret_prints_that_deliveries_are_not_verified(user, listen):
    listener = listen()
    assert "not verified" in listener.line()
    factories.EndpointFactory(user=user, url=listener.url)
    record(user)
    deliver()
    assert "not verified" in listener.line()


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b"\xff", b'{"type": 1}'])
def test_invalid_request_does_not_stop_the_listener(listen, body):
    listener = listen()
    listener.line()
    with pytest.raises(urllib.error.HTTPError, match="400"):
        urllib.request.urlopen(urllib.request.Request(listener.url, body), timeout=10)
    assert "REFUSED" in listener.line()
    assert listener.interrupt() == 0


def test_port_in_use_is_reported_without_a_traceback(listen):
    port = listen().url.rstrip("/").rpartition(":")[2]
    command = [sys.executable, "manage.py", "webhook_listen", "--port", port]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert f"Can't listen on port {port}" in done.stderr
    assert "Traceback" not in done.stderr


# --- the rules of verification ---------------------------------------------------------------------------------------
NOW = 1_800_000_000.0
SECRET = "0f" * 32
BODY = b'{"id":"evt_1"}'


def headers(**changes: str) -> dict[str, str]:
    signed = signing.signed_headers("evt_1", 1, BODY, int(NOW * 1000), [SECRET])
    return {**signed, **changes}


@pytest.mark.parametrize("offset", [-299, 0, 299])
def test_recent_delivery_is_valid(offset):
    signing.verify(headers(), BODY, SECRET, NOW + offset)


@pytest.mark.parametrize("offset", [-301, 301])
def test_old_delivery_is_refused(offset):
    with pytest.raises(signing.VerificationFailed, match="300 seconds"):
        signing.verify(headers(), BODY, SECRET, NOW + offset)


@pytest.mark.parametrize("name", sorted(headers().keys() - {"X-Service-Delivery-Attempt", "X-Service-Event-Id"}))
def test_each_signed_header_is_required_and_verified(name):
    with pytest.raises(signing.VerificationFailed):
        signing.verify(headers(**{name: "1"}), BODY, SECRET, NOW)
    without = headers()
    del without[name]
    with pytest.raises(signing.VerificationFailed, match="missing"):
        signing.verify(without, BODY, SECRET, NOW)


def test_changed_body_is_refused():
    with pytest.raises(signing.VerificationFailed):
        signing.verify(headers(), BODY + b" ", SECRET, NOW)
