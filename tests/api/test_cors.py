"""Web apps of other origins: ``CORS_ALLOWED_ORIGINS`` (docs/api.md, "Browser apps")."""

from typing import Any

import pytest
from django.test import Client
from rest_framework.test import APIClient

pytestmark = [pytest.mark.django_db, pytest.mark.urls("tests.api.urls")]
APP, OTHER = "https://app.example.com", "https://other.example.com"
PATHS = [
    "/api/v1/me",
    "/api/v1/no-such-path",
    "/api/v1/runs/run_1/stream",
    "/api/public/v1/runs/run_1/stream",
    "/api/public/v1/key",
    f"/files/{'0' * 64}/a.txt",
    "/uploads/token",
]
OTHER_PATHS = ["/api/mcp", "/api/schema", "/api/docs", "/admin/login/", "/playground", "/livez", "/filesystem"]


@pytest.fixture(autouse=True)
def allowed(settings: Any) -> None:
    settings.CORS_ALLOWED_ORIGINS = ["http://localhost:3000", APP]


def ask(path: str, origin: str | None = APP, *, preflight: bool = False, client: Any = None, **options: Any) -> Any:
    headers = {"Origin": origin} if origin else {}
    if preflight:
        headers |= {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    method = (client or Client(raise_request_exception=False)).options if preflight else (client or Client()).get
    return method(path, headers=headers, **options)


def is_allowed(answer: Any, origin: str = APP) -> bool:
    assert "Access-Control-Allow-Credentials" not in answer.headers
    return bool(answer.get("Access-Control-Allow-Origin") == origin)


@pytest.mark.parametrize("path", PATHS)
def test_an_app_of_an_allowed_origin_may_call(path: str) -> None:
    preflight = ask(path, preflight=True)
    assert (preflight.status_code, preflight.content) == (200, b"")
    assert is_allowed(preflight)
    headers = preflight["Access-Control-Allow-Headers"].split(", ")
    assert {"authorization", "content-type", "idempotency-key", "last-event-id", "range", "x-request-id"} <= {*headers}
    assert {"GET", "POST", "PATCH", "PUT", "DELETE"} <= {*preflight["Access-Control-Allow-Methods"].split(", ")}
    assert int(preflight["Access-Control-Max-Age"]) > 0
    answer = ask(path)
    assert answer.status_code in (401, 404, 405)
    assert is_allowed(answer)
    assert "origin" in answer["Vary"].lower()
    exposed = {name.lower() for name in answer["Access-Control-Expose-Headers"].split(", ")}
    assert exposed == {
        *("x-request-id", "retry-after", "x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset"),
        *("idempotent-replayed", "link", "location", "x-vercel-ai-ui-message-stream"),
    }
    assert answer["X-Request-Id"]


@pytest.mark.parametrize("origin", [OTHER, "null", "https://app.example.com.evil.com", "http://app.example.com", "["])
@pytest.mark.parametrize("path", PATHS[:2])
def test_another_origin_may_not(path: str, origin: str) -> None:
    for answer in (ask(path, origin, preflight=True), ask(path, origin)):
        assert not [name for name in answer.headers if name.lower().startswith("access-control-")]
        assert "origin" in answer["Vary"].lower()


@pytest.mark.parametrize("path", OTHER_PATHS)
def test_other_paths_allow_no_origin(path: str) -> None:
    for answer in (ask(path, preflight=True), ask(path)):
        assert not [name for name in answer.headers if name.lower().startswith("access-control-")]


def test_mcp_has_origins_of_its_own(settings: Any) -> None:
    settings.MCP_ALLOWED_ORIGINS = [OTHER]
    for preflight in (True, False):
        assert is_allowed(ask("/api/mcp", OTHER, preflight=preflight), OTHER)
        assert not is_allowed(ask("/api/mcp", preflight=preflight))
        assert not is_allowed(ask(PATHS[0], OTHER, preflight=preflight), OTHER)
    headers = ask("/api/mcp", OTHER, preflight=True)["Access-Control-Allow-Headers"].split(", ")
    assert {"authorization", "content-type", "mcp-method", "mcp-name", "mcp-protocol-version"} <= {*headers}


def test_no_origin_is_allowed_by_default(settings: Any) -> None:
    settings.CORS_ALLOWED_ORIGINS = []
    assert not is_allowed(ask(PATHS[0], preflight=True))
    assert not is_allowed(ask(PATHS[0]))


def test_a_caller_without_origin_gets_no_such_headers() -> None:
    answer = ask(PATHS[0], None)
    assert not [name for name in answer.headers if name.lower().startswith("access-control-")]


def test_preflights_cost_nothing_and_refusals_are_readable(limits: Any) -> None:
    limits.RATE_LIMIT_UNAUTHENTICATED = 1
    for _ in range(3):
        assert ask(PATHS[0], preflight=True).status_code == 200
    assert ask(PATHS[0]).status_code == 401
    refused = ask(PATHS[0])
    assert (refused.status_code, is_allowed(refused)) == (429, True)
    assert refused["Retry-After"]


def test_errors_are_readable(session: APIClient) -> None:
    session.raise_request_exception = False
    headers = {"Origin": APP}
    too_large = session.post("/api/v1/groups", b"x" * 2**21, content_type="application/json", headers=headers)
    assert (too_large.status_code, is_allowed(too_large)) == (413, True)
    crash = session.post("/api/v1/groups", {"name": "crash"}, format="json", headers=headers)
    assert (crash.status_code, is_allowed(crash)) == (500, True)
    assert crash.json()["error"]["code"] == "INTERNAL_ERROR"
    once = headers | {"Idempotency-Key": "1"}
    replayed = [session.post("/api/v1/groups", {"name": "a"}, format="json", headers=once) for _ in range(2)]
    assert is_allowed(replayed[1])
    assert replayed[1]["Idempotent-Replayed"] == "true"


def test_a_wrong_host_is_readable() -> None:
    answer = ask(PATHS[0], SERVER_NAME="other.example.com")
    assert (answer.status_code, is_allowed(answer)) == (400, True)
