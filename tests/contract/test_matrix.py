"""Rules of every operation: credentials, scopes, ownership of objects, and invalid requests."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import pytest
from django.conf import settings
from django.db import transaction
from rest_framework.test import APIClient

from apikeys.keys import DEFAULT_SCOPES, create_key, create_server_key, revoke_key
from apikeys.models import ApiKey
from chats.models import Chat
from config.api.session_tokens import mint
from config.api.viewsets import ServiceViewSet
from config.kernel import clock, jsontext
from config.kernel.jsontext import dumps
from config.serve.requests import body_limit
from runs.models import Run, Waitpoint
from tests import factories
from tests.contract.routes import Operation, methods_of, operations, routes, surface_of
from tests.contract.world import AG_UI_REQUEST, CHAT_REQUEST, World, unknown_ids

pytestmark = pytest.mark.django_db

# (method, path in the surface) → the scope that it needs according to docs/resources.md.
SCOPES = {
    "POST chats": "chats:write",
    "GET chats": "chats:read",
    "GET chats/{chatId}": "chats:read",
    "PATCH chats/{chatId}": "chats:write",
    "DELETE chats/{chatId}": "chats:write",
    "GET chats/{chatId}/messages": "chats:read",
    "GET messages/{messageId}": "chats:read",
    "POST attachments": "attachments:write",
    "POST attachments/{attachmentId}/complete": "attachments:write",
    "GET attachments/{attachmentId}": "chats:read",
    "GET attachments/{attachmentId}/content": "chats:read",
    "POST chats/{chatId}/runs": "runs:write",
    "GET chats/{chatId}/runs": "runs:read",
    "GET runs": "runs:read",
    "GET runs/{runId}": "runs:read",
    "POST runs/{runId}/cancel": "runs:write",
    "GET runs/{runId}/turns": "runs:read",
    "GET runs/{runId}/stream": "runs:read",
    "POST ai-sdk/chat": "runs:read",
    "GET ai-sdk/chat/{chatKey}/stream": "runs:read",
    "GET ai-sdk/chat/{chatKey}/messages": "chats:read",
    "POST ai-sdk/chat/{chatKey}/stop": "runs:write",
    "POST ag-ui/agents/{agent}": "runs:read",
    "GET copilotkit/info": "runs:read",
    "POST copilotkit/agent/{agent}/run": "runs:read",
    "POST copilotkit/agent/{agent}/connect": "runs:read",
    "POST copilotkit/agent/{agent}/stop/{threadId}": "runs:write",
    "GET tool-invocations/{toolInvocationId}": "runs:read",
    "POST tool-invocations/{toolInvocationId}/result": "runs:write",
    "GET waitpoints/{waitpointId}": "runs:read",
    "POST waitpoints/{waitpointId}/respond": "waitpoints:respond",
    "GET agents": "runs:read",
    "GET models": "runs:read",
    "GET tools": "runs:read",
    "GET me/credits": "credits:read",
    "GET key": "",
}
# For a chat of another user this operation shows an empty ledger, so the chat's existence is not revealed.
EMPTY_INSTEAD_OF_404 = {"GET /api/v1/me/credits/ledger/chat/{chatId}"}
# These headers differ between requests.
VARIABLE_HEADERS = {"x-request-id", "x-ratelimit-remaining", "x-ratelimit-reset"}


@pytest.fixture
def user(db: None, worlds: tuple[World, World]) -> Any:
    """A user with rows of every kind."""
    return copy(worlds[0].user)


@pytest.fixture
def ids(worlds: tuple[World, World]) -> dict[str, str]:
    """The rows of ``user``."""
    return worlds[0].ids


@pytest.fixture
def stranger(worlds: tuple[World, World]) -> World:
    return worlds[1]


WITH_BODY = [operation for operation in operations() if operation.takes_body]
WITH_OBJECT = [operation for operation in operations() if operation.parameters]


@contextmanager
def unchanged(operation: Operation) -> Iterator[None]:
    """Roll the changes back, and tell which operation fails. A test for each would take twice as long."""
    try:
        with transaction.atomic():
            yield
            transaction.set_rollback(True)
    except Exception as error:
        error.add_note(str(operation))
        raise


def call(client: APIClient, operation: Operation, ids: dict[str, str] | None = None, **options: Any) -> Any:
    method = options.pop("method", operation.method)
    if operation.takes_body:
        options = {"data": b"{}", "content_type": "application/json"} | options
    return client.generic(method, operation.url(ids or unknown_ids()), **options)


def bearing(token: str) -> APIClient:
    client = APIClient()
    client.credentials(HTTP_AUTHORIZATION=f"Bearer {token}")
    return client


def caller(operation: Operation, user: Any) -> APIClient:
    return operation.client(user)


def refusal(response: Any, status: int, code: str) -> dict[str, Any]:
    """Assert that the answer is the error envelope and nothing else. Returns the error."""
    assert response.status_code == status, response.content
    assert response["Content-Type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) <= {"code", "message", "details"}
    assert body["error"]["code"] == code
    assert body["error"]["message"]
    assert response["X-Request-Id"]
    assert response["X-RateLimit-Limit"]
    return body["error"]


# --- the routes ------------------------------------------------------------------------------------------------------
def test_every_route_is_a_viewset_of_its_surface():
    for path, callback in routes():
        assert issubclass(callback.cls, ServiceViewSet), path
        view = callback.cls(**callback.initkwargs)
        assert view.surface == ("server" if view.server_scope else surface_of(path)), path


def test_every_public_operation_requires_its_documented_scope():
    for operation in operations("public"):
        assert operation.scope == SCOPES[f"{operation.method} {operation.relative}"], operation


# --- credentials and scopes ------------------------------------------------------------------------------------------
def expired_key(user: Any) -> str:
    key, secret = create_key(user, name="old")
    ApiKey.objects.filter(pk=key.pk).update(expires_at=clock.now())
    return secret


def revoked_key(user: Any) -> str:
    key, secret = create_key(user, name="gone")
    revoke_key(key)
    return secret


def key(user: Any) -> str:
    return create_key(user, name="good")[1]


def key_of_inactive(user: Any) -> str:
    secret = key(user)
    deactivate(user)
    return secret


def token(user: Any) -> str:
    return mint(user.get_username())


def token_of_inactive(user: Any) -> str:
    text = token(user)
    deactivate(user)
    return text


def expired_token(user: Any) -> str:
    return mint(user.get_username(), hours=-(settings.SESSION_LEEWAY_SECONDS + 5) / 3600)


def forged_token(user: Any) -> str:
    head, body, signature = token(user).split(".")
    return ".".join([head, body, signature[::-1]])


def deactivate(user: Any) -> None:
    user.is_active = False
    user.save(update_fields=["is_active"])


def revoked_server_key(user: Any) -> str:
    key, secret = create_server_key("gone")
    revoke_key(key)
    return secret


UNKNOWN_KEY = "awk_" + "0" * 49
BAD: dict[str, list[Callable[[Any], str]]] = {
    "session": [key, expired_token, forged_token, token_of_inactive, lambda user: "nonsense"],
    "public": [token, expired_key, revoked_key, key_of_inactive, lambda user: UNKNOWN_KEY],
    "server": [token, key, revoked_server_key, lambda user: "aws_" + "0" * 49],
}
# Bodies that are checked before the object is looked up.
BODIES = {"users/{userId}/credits/grants/{ledgerId}/revoke": {"reference": "re_1", "reason": "Refunded"}}


def test_a_missing_credential_is_401(user, ids):
    for operation in operations():
        with unchanged(operation):
            response = call(APIClient(), operation, ids)
            refusal(response, 401, "UNAUTHORIZED")
            assert response["WWW-Authenticate"] == "Bearer"


def test_invalid_or_expired_credentials_are_401(user):
    for operation in operations():
        with unchanged(operation):
            for make in BAD["server" if operation.server_scope else operation.surface]:
                response = call(bearing(make(copy(user))), operation)
                refusal(response, 401, "UNAUTHORIZED")
                assert response["WWW-Authenticate"] == "Bearer"


def test_valid_credentials_are_accepted(user, ids):
    for operation in operations():
        with unchanged(operation):
            response = call(caller(operation, user), operation, ids)
            assert response.status_code not in (401, 403, 404, 405, 500), response.content


def test_a_missing_scope_is_403(user, ids):
    for operation in operations("public"):
        with unchanged(operation):
            if operation.scope:
                others = [scope for scope in DEFAULT_SCOPES if scope != operation.scope]
                assert len(others) == len(DEFAULT_SCOPES) - 1
                error = refusal(call(factories.public_client(user, others), operation, ids), 403, "FORBIDDEN")
                assert error["details"] == {"requiredScope": operation.scope}
            alone = call(factories.public_client(user, [operation.scope]), operation, ids)
            assert alone.status_code not in (401, 403), alone.content


WRITES: dict[str, Any] = {
    "POST chats": {},
    "PATCH chats/{chatId}": {"title": "mine"},
    "DELETE chats/{chatId}": {},
    "POST attachments": {"fileName": "a", "contentType": "text/plain", "sizeBytes": 1},
    "POST attachments/{attachmentId}/complete": {},
    "POST chats/{chatId}/runs": {"message": "Hello", "onActiveRun": "enqueue"},
    "POST runs/{runId}/cancel": {},
    "POST ai-sdk/chat": CHAT_REQUEST,
    "POST ai-sdk/chat/{chatKey}/stop": {},
    "POST ag-ui/agents/{agent}": AG_UI_REQUEST,
    "POST copilotkit/agent/{agent}/run": AG_UI_REQUEST,
    "POST copilotkit/agent/{agent}/connect": AG_UI_REQUEST,
    "POST copilotkit/agent/{agent}/stop/{threadId}": {},
    "POST tool-invocations/{toolInvocationId}/result": {"result": "mine"},
    "POST waitpoints/{waitpointId}/respond": {"kind": "CLARIFICATION", "answer": "mine"},
}


def test_a_scope_to_write_shows_no_text_of_others(user, ids):
    for operation in [each for each in operations("public") if each.method != "GET"]:
        with unchanged(operation):
            secret = "TEXT-OF-A-RUN"
            factories.ToolInvocationFactory(
                run_id=ids["runId"], input={"q": secret}, result=secret, error_message=secret
            )
            factories.force_update(Run.objects.filter(pk=ids["runId"]), error_message=secret, metadata={"a": secret})
            factories.force_update(
                Waitpoint.objects.filter(pk=ids["waitpointId"]),
                kind="CLARIFICATION",
                request_payload={"question": secret, "options": [secret]},
            )
            Chat.objects.filter(pk=ids["chatId"]).update(title=secret)
            body = WRITES[f"{operation.method} {operation.relative}"]
            narrow = factories.public_client(user, [operation.scope])
            answers = [
                client.generic(
                    operation.method, operation.url(ids), dumps(body), "application/json", HTTP_IDEMPOTENCY_KEY="a"
                )
                for client in (factories.public_client(user), narrow)
            ]
            if operation.action in ("cancel", "respond"):
                assert secret in answers[0].text
                assert answers[1].json().keys() == answers[0].json().keys()
            assert answers[0].status_code < 300
            assert secret not in answers[1].getvalue().decode()


@pytest.mark.parametrize("missing", ["runs:read", ""])
def test_an_approval_is_shown_to_the_key_that_gives_it(user, missing):
    payload = {"toolName": "t", "estimatedMicro": 1, "thresholdMicro": 1, "toolInvocationId": "inv_1"}
    payload["input"] = {"q": "TEXT"}
    waitpoint = factories.WaitpointFactory(run__chat__user=user, kind="CREDIT_APPROVAL", request_payload=payload)
    client = factories.public_client(user, [scope for scope in DEFAULT_SCOPES if scope != missing])
    body = {"kind": "CREDIT_APPROVAL", "approved": True}
    answer = client.post(f"/api/public/v1/waitpoints/{waitpoint.pk}/respond", body, format="json").json()
    assert answer["resolvedPayload"]["approved"] is True
    assert answer["requestPayload"].keys() == {
        *("toolName", "estimatedCredits", "threshold", "toolInvocationId", "input")
    }
    assert answer["requestPayload"]["input"] == (None if missing else payload["input"])


# --- objects of other users ------------------------------------------------------------------------------------------
def seen(response: Any) -> tuple[int, bytes, dict[str, str]]:
    content = b"".join(response.streaming_content) if response.streaming else response.content
    headers = {name.lower(): value for name, value in response.headers.items()}
    return response.status_code, content, {k: v for k, v in headers.items() if k not in VARIABLE_HEADERS}


def test_an_object_of_another_user_is_404(user, stranger):
    for operation in WITH_OBJECT:
        with unchanged(operation):
            client = caller(operation, user)
            assert set(operation.parameters) <= set(stranger.ids), "tests/contract/world.py makes no such object"
            own = {"userId": user.get_username()}
            body = {"data": json.dumps(BODIES.get(operation.relative, {}))} if operation.takes_body else {}
            anothers = call(client, operation, stranger.ids | own, **body)
            nobodys = call(client, operation, unknown_ids() | own, **body)
            if str(operation) in EMPTY_INSTEAD_OF_404:
                assert anothers.json() == {"chatTitle": None, "items": []}
            else:
                refusal(anothers, 404, "NOT_FOUND")
            assert seen(anothers) == seen(nobodys)


@pytest.mark.parametrize("odd", ["%00", "x" * 10_000, "%2F..%2F", "%F0%9F%A6%84", "%ff", "null", "run_' OR 1=1"])
def test_a_malformed_id_is_404(odd, user):
    for operation in WITH_OBJECT:
        with unchanged(operation):
            body = {"data": json.dumps(BODIES.get(operation.relative, {}))} if operation.takes_body else {}
            response = call(caller(operation, user), operation, dict.fromkeys(operation.parameters, odd), **body)
            if str(operation) in EMPTY_INSTEAD_OF_404 and response.status_code == 200:
                assert response.json() == {"chatTitle": None, "items": []}
            else:
                refusal(response, 404, "NOT_FOUND")


def test_no_data_of_another_user_is_shown(user, stranger):
    for operation in [each for each in operations() if each.method == "GET" and not each.parameters]:
        with unchanged(operation):
            _, content, _ = seen(call(caller(operation, user), operation))
            assert not [secret for secret in stranger.secrets if secret.encode() in content]


# --- invalid requests ------------------------------------------------------------------------------------------------
def test_an_unsupported_method_is_405(user, ids):
    for operation in operations():
        with unchanged(operation):
            client, allowed = caller(operation, user), methods_of(operation.path)
            for method in {"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "QUERY"} - allowed:
                response = call(client, operation, ids, method=method)
                refusal(response, 405, "METHOD_NOT_ALLOWED")
                assert set(response["Allow"].split(", ")) == allowed


def test_a_body_that_is_too_large_is_413(user, ids):
    for operation in WITH_BODY:
        with unchanged(operation):
            body = b'{"title": "' + b"x" * body_limit(operation.path) + b'"}'
            refusal(call(caller(operation, user), operation, ids, data=body), 413, "PAYLOAD_TOO_LARGE")


def malformed() -> Iterator[bytes]:
    yield from (
        b"{",
        b"[]",
        b'"text"',
        b"\xff",
        b'{"a": 1, "a": 2}',
        b'{"a": NaN}',
        b'{"a": "\\ud800"}',
        b'{"a":"\\u0000"}',
    )
    yield b'{"a":' * (jsontext.API_MAX_JSON_DEPTH + 1) + b"1" + b"}" * (jsontext.API_MAX_JSON_DEPTH + 1)


def test_a_malformed_body_is_400(user, ids):
    for operation in WITH_BODY:
        with unchanged(operation):
            client = caller(operation, user)
            for body in malformed():
                refusal(call(client, operation, ids, data=body), 400, "VALIDATION_ERROR")


def test_an_unknown_field_is_400_also_where_no_body_is_needed(user, ids):
    for operation in [each for each in WITH_BODY if not each.is_foreign]:
        with unchanged(operation):
            client = caller(operation, user)
            # The other fields are those of an answer to the waitpoint, of which the kind is checked first.
            body = dumps({"kind": "CLARIFICATION", "answer": "x", "unknownField": 1})
            error = refusal(call(client, operation, ids, data=body), 400, "VALIDATION_ERROR")
            assert error["details"]["fields"]["unknownField"] == ["Unknown field."]


def test_an_unknown_query_parameter_is_400(user, ids):
    for operation in operations():
        with unchanged(operation):
            url, client = operation.url(ids), caller(operation, user)
            response = client.generic(operation.method, f"{url}?odd=1&%00=&limi=2", "{}", "application/json")
            fields = refusal(response, 400, "VALIDATION_ERROR")["details"]["fields"]
            assert fields["odd"] == fields["\0"] == ["Unknown field."]
            meant = ["Did you mean limit?"] if operation.action in ("list", "messages") else []
            assert fields["limi"] == ["Unknown field.", *meant]


def test_a_misspelt_filter_is_told_the_right_name(session):
    response = session.get("/api/v1/runs?stauts=failed&metdata.a=1&metadata.a=1&metadata=1")
    fields = refusal(response, 400, "VALIDATION_ERROR")["details"]["fields"]
    assert fields == {
        "stauts": ["Unknown field.", "Did you mean status?"],
        "metdata.a": ["Unknown field.", "Did you mean metadata.a?"],
    }


def test_another_media_type_is_415(user, ids):
    for operation in WITH_BODY:
        with unchanged(operation):
            client = caller(operation, user)
            for media_type in ("text/plain", "application/x-www-form-urlencoded", "application/json; charset=latin-1"):
                response = call(client, operation, ids, data=b'{"a": 1}', content_type=media_type)
                refusal(response, 415, "UNSUPPORTED_MEDIA_TYPE")
