"""Every error under /api has the envelope of docs/api.md, whatever part of the service raised it."""

import json
import logging

import pytest
from django.contrib.sessions.backends.db import SessionStore
from django.db import OperationalError
from django.http import HttpResponse
from django.test import Client
from rest_framework.test import APIClient

from apikeys import keys
from config.api.middleware import ApiErrorMiddleware, RequestIdMiddleware
from config.telemetry.logs import SafeMessage

pytestmark = [pytest.mark.django_db, pytest.mark.urls("tests.api.urls")]


def envelope(response, status: int, code: str) -> dict:
    assert response.status_code == status
    assert response["Content-Type"] == "application/json"
    assert response["X-Request-Id"]
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) <= {"code", "message", "details"}
    assert body["error"]["code"] == code
    assert "secret" not in response.content.decode().lower()
    return body["error"]


@pytest.fixture
def anyone() -> Client:
    return Client(raise_request_exception=False)


UNKNOWN_PATHS = [
    "/api",
    "/api/",
    "/api/v1",
    "/api/v1/",
    "/api/v1/nothing",
    "/api/v2/me",
    "/api/v1/me/",
    "/api/v1/api-keys/a%2Fb",
    "/api/v1/line%0Abreak",
    "/api/v1/%00",
    "/api/v1/%FF%FE",
    "/api/v1/" + "x" * 10_000,
    "/api/public/v1/../v1/nothing",
]


@pytest.mark.parametrize("method", ["get", "post", "put", "patch", "delete", "options"])
def test_an_unknown_path_is_404(anyone, subtests, method):
    for path in UNKNOWN_PATHS:
        with subtests.test(path[:100]):
            envelope(getattr(anyone, method)(path), 404, "NOT_FOUND")


@pytest.mark.parametrize(("path", "named"), [("/api/v1/chats/", True), ("/api/v1/nothing/", False), ("/api/", False)])
def test_a_slash_at_the_end_is_named(anyone, path, named):
    answer = anyone.get(path)
    assert answer.status_code == 404
    assert ("no slash at its end" in answer.json()["error"]["message"]) is named


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        ("crash", 500, "INTERNAL_ERROR"),
        ("overflow", 500, "INTERNAL_ERROR"),
        ("forbidden", 403, "FORBIDDEN"),
        ("html", 418, "IM_A_TEAPOT"),
    ],
)
def test_errors_outside_the_framework_have_the_envelope(anyone, settings, debug, kind, status, code):
    settings.DEBUG = debug
    envelope(anyone.get(f"/api/fail/{kind}"), status, code)


@pytest.mark.parametrize("surface", ["v1", "public/v1"])
def test_headers_that_are_too_large_have_their_own_code(rf, surface):
    server = RequestIdMiddleware(ApiErrorMiddleware(lambda request: HttpResponse("<h1>secret</h1>", status=431)))
    answer = server(rf.get(f"/api/{surface}/runs"))
    assert answer["Content-Type"] == "application/json"
    assert json.loads(answer.content)["error"]["code"] == "HEADERS_TOO_LARGE"


def test_a_database_that_is_away_is_503_outside_the_framework(anyone):
    envelope(anyone.get("/api/fail/database"), 503, "UNAVAILABLE")


def test_a_page_without_its_database_is_a_page(anyone):
    answer = anyone.get("/fail/database")
    assert (answer.status_code, answer["Content-Type"]) == (503, "text/html; charset=utf-8")
    assert int(answer["Retry-After"]) >= 1
    assert answer["Cache-Control"] == "no-store"
    assert b"<h1>" in answer.content
    assert b"secret" not in answer.content
    assert "default-src 'none'" in answer["Content-Security-Policy"]


def test_a_page_whose_session_cannot_be_read_is_a_page(anyone, monkeypatch):
    def away(*args, **kwargs):
        raise OperationalError("secret: no route to host")

    monkeypatch.setattr(SessionStore, "load", away)
    anyone.cookies["sessionid"] = "x" * 32
    for path in ("/admin/", "/admin/runs/run/"):
        answer = anyone.get(path)
        assert (answer.status_code, answer["Content-Type"]) == (503, "text/html; charset=utf-8")
        assert b"secret" not in answer.content


def test_no_log_line_has_a_path_because_it_may_be_a_credential(anyone, caplog):
    caplog.handler.addFilter(SafeMessage())
    assert anyone.get("/api/fail/database").status_code == 503
    assert "Service Unavailable: /api/fail/<kind>" in caplog.messages


def test_other_paths_keep_their_own_error_pages(anyone):
    assert anyone.get("/fail/html").content == b"<h1>secret</h1>"
    assert anyone.get("/nothing")["Content-Type"].startswith("text/html")
    assert anyone.get("/fail/crash")["Content-Type"].startswith("text/html")


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("host", ["evil.example.com", "a b", "", "[::1", "x" * 3000])
def test_a_disallowed_host_is_400(anyone, settings, debug, host):
    settings.DEBUG = debug
    settings.ALLOWED_HOSTS = ["testserver"]
    response = anyone.get("/api/v1/me", HTTP_HOST=host) if host else anyone.get("/api/v1/me", SERVER_NAME="")
    envelope(response, 400, "VALIDATION_ERROR")


def test_a_crash_in_a_view_is_500_and_is_logged(session, caplog):
    with caplog.at_level(logging.ERROR):
        error = envelope(session.post("/api/v1/groups", {"name": "crash"}, format="json"), 500, "INTERNAL_ERROR")
    assert error["message"] == "Something went wrong on our side."
    assert "a secret of the server" in caplog.text


def test_an_unreachable_database_is_503(session, monkeypatch):
    def away(*args, **kwargs):
        raise OperationalError("secret: no route to host")

    monkeypatch.setattr(keys, "create_key", away)
    envelope(session.post("/api/v1/api-keys", {"name": "x"}, format="json"), 503, "UNAVAILABLE")


def test_405_requires_no_scope(public):
    envelope(public.options("/api/public/v1/groups"), 405, "METHOD_NOT_ALLOWED")
    envelope(public.delete("/api/public/v1/groups"), 405, "METHOD_NOT_ALLOWED")
    envelope(public.generic("BREW", "/api/public/v1/groups"), 405, "METHOD_NOT_ALLOWED")


@pytest.mark.parametrize("accept", ["text/html", "application/xml", "text/event-stream", "nonsense", ";;;", "a/b;q=x"])
def test_other_media_types_are_406(session, accept):
    envelope(session.get("/api/v1/me", HTTP_ACCEPT=accept), 406, "NOT_ACCEPTABLE")


@pytest.mark.parametrize("accept", ["*/*", "application/*", "application/json", "text/html, */*;q=0.1"])
def test_json_is_served_to_clients_that_accept_it(session, accept):
    answer = session.get("/api/v1/me", HTTP_ACCEPT=accept)
    assert (answer.status_code, answer["Content-Type"]) == (200, "application/json")


def test_authentication_is_checked_before_the_body_and_the_accept_header():
    response = APIClient().post("/api/v1/groups", "{", content_type="text/xml", HTTP_ACCEPT="text/html")
    envelope(response, 401, "UNAUTHORIZED")
    assert response["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize("path", ["/api/v1/groups", "/api/v1/me"])
def test_too_many_query_parameters_are_400(session, path):
    envelope(session.get(f"{path}?" + "a=1&" * 1500), 400, "VALIDATION_ERROR")


@pytest.mark.parametrize("charset", ["rot13", "hex", "idna", "nonsense", "\xff", "utf-7"])
def test_an_unusual_charset_does_not_affect_the_query_string(session, charset):
    response = session.get("/api/v1/groups?q=%C3%BC", CONTENT_TYPE=f"application/json; charset={charset}")
    assert response.json() == {"items": ["ü"]}


def test_validation_errors_name_each_field(session):
    error = envelope(
        session.post("/api/v1/api-keys", {"name": "", "expirationDays": 0}, format="json"), 400, "VALIDATION_ERROR"
    )
    assert set(error["details"]["fields"]) == {"name", "expirationDays"}
    assert all(isinstance(text, str) for messages in error["details"]["fields"].values() for text in messages)
