"""An identity provider that hangs while the web process has none of its keys."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler

import jwt
import pytest
import requests
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.driver import until
from tests.http_server import serving
from tests.stack.plugin import given_services
from tests.stack.stack import Client, Stack

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.services, pytest.mark.timeout(300)]

THREADS = 16
TIMEOUT_SECONDS = 5
KEY = """
from django.contrib.auth.models import User
from apikeys.keys import create_key
print(create_key(User.objects.create_user("ada"), name="key")[1])
"""


def test_other_requests_wait_for_one_time_out_at_most() -> None:
    """The requests with session tokens occupy every thread. Before, each made an attempt after the other."""
    fetches: list[float] = []
    released = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            fetches.append(time.monotonic())
            released.wait(120)

    def waited(client: Client, path: str) -> tuple[int, float]:
        begun = time.monotonic()
        return client.get(path, timeout=120).status_code, time.monotonic() - begun

    with serving(Handler) as provider:
        environment = {
            "WEB_THREADS": str(THREADS),
            "SESSION_ISSUER": "https://id.example.com/",
            "SESSION_AUDIENCE": "agents",
            "SESSION_JWKS_URL": f"{provider}/jwks",
            "config.api.session_tokens.SESSION_JWKS_TIMEOUT_SECONDS": str(TIMEOUT_SECONDS),
        }
        without = ("runs-1", "webhooks", "maintenance", "beat")
        with Stack(**given_services(), environment=environment, without=without) as stack:
            secret = stack.manage("shell", "--no-imports", "-c", KEY).split()[-1]
            token = jwt.encode({"sub": "bob"}, Ed25519PrivateKey.generate(), "EdDSA", headers={"kid": "k"})
            session = Client(f"{stack.url}/api/v1", token)
            public = Client(f"{stack.url}/api/public/v1", secret)
            with ThreadPoolExecutor(2 * THREADS) as pool:
                waiting = [pool.submit(waited, session, "/me") for _ in range(THREADS)]
                until(lambda: fetches)
                others = [pool.submit(waited, public, "/key") for _ in range(4)]
                others += [pool.submit(waited, public, f"{stack.url}/livez") for _ in range(4)]
                refused, answered = [[each.result() for each in group] for group in (waiting, others)]
            assert {status for status, _ in refused} == {503}
            assert {status for status, _ in answered} == {200}
            assert max(seconds for _, seconds in refused + answered) < 2 * TIMEOUT_SECONDS
            assert len(fetches) == 1
            # From now on nobody waits for the provider, although it is asked again.
            for _ in range(3):
                assert session.get("/me", timeout=TIMEOUT_SECONDS).status_code == 503
            until(lambda: session.get("/me", timeout=TIMEOUT_SECONDS).status_code == 503 and len(fetches) == 2)
            assert requests.get(f"{stack.url}/livez", timeout=TIMEOUT_SECONDS).status_code == 200
            released.set()
