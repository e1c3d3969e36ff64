"""POST /api/mcp as raw JSON-RPC: both revisions, the tools, and everything that is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.conf import settings
from rest_framework.test import APIClient

from apikeys.keys import DEFAULT_SCOPES, create_key, revoke_key
from chats.models import Chat
from config.api import ratelimit
from config.api.ratelimit import Verdict
from runs.models import Run
from tests import factories
from tests.contract.world import build, unknown_ids
from tests.credits.helpers import fund

pytestmark = pytest.mark.django_db

URL = "/api/mcp"
MODERN, LEGACY = "2026-07-28", "2025-11-25"
VERSION_KEY = "io.modelcontextprotocol/protocolVersion"
ENVELOPE = {VERSION_KEY: MODERN, "io.modelcontextprotocol/clientCapabilities": {}}
TOOLS = {
    "list_chats": "chats:read",
    "create_chat": "chats:write",
    "start_run": "runs:write",
    "get_run": "runs:read",
    "cancel_run": "runs:write",
    "respond_to_waitpoint": "waitpoints:respond",
    "get_credits": "credits:read",
}


def post(client: APIClient, body: Any, **headers: str) -> Any:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return client.generic(
        "POST", URL, raw, content_type=headers.pop("content_type", "application/json"), headers=headers
    )


def rpc(client: APIClient, method: str, params: dict[str, Any] | None = None, **headers: str) -> Any:
    """A request of the older revision."""
    body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params or {}}
    return post(client, body, **{"MCP-Protocol-Version": LEGACY, **headers})


def modern(client: APIClient, method: str, params: dict[str, Any] | None = None, **headers: str) -> Any:
    """A request of the newer one; ``headers`` replaces its own."""
    params = {"_meta": ENVELOPE, **(params or {})}
    own = {"MCP-Protocol-Version": MODERN, "Mcp-Method": method}
    if method == "tools/call":
        own["Mcp-Name"] = str(params.get("name"))
    sent = {name: value for name, value in (own | headers).items() if value}
    return post(client, {"jsonrpc": "2.0", "id": "a", "method": method, "params": params}, **sent)


def call(client: APIClient, name: str, **arguments: Any) -> dict[str, Any]:
    """A tool's result, the same in both revisions but for what the newer one adds."""
    response = rpc(client, "tools/call", {"name": name, "arguments": arguments})
    assert response.status_code == 200, response.content
    body = response.json()
    assert (body["jsonrpc"], body["id"]) == ("2.0", 1)
    result = body["result"]
    assert json.loads(result["content"][0]["text"]) == result["structuredContent"]
    return result


def done(client: APIClient, name: str, **arguments: Any) -> Any:
    result = call(client, name, **arguments)
    assert result["isError"] is False, result
    return result["structuredContent"]


def refused(client: APIClient, name: str, **arguments: Any) -> dict[str, Any]:
    result = call(client, name, **arguments)
    assert result["isError"] is True, result
    error: dict[str, Any] = result["structuredContent"]["error"]
    return error


def error_of(response: Any, status: int, code: int) -> dict[str, Any]:
    assert response.status_code == status, response.content
    assert response["Content-Type"] == "application/json"
    body = response.json()
    assert set(body) == {"jsonrpc", "id", "error"}
    assert body["error"]["code"] == code
    assert body["error"]["message"]
    return body


# --- the revisions ---------------------------------------------------------------------------------------------------
class TestLegacy:
    def test_handshake(self, public):
        params = {"protocolVersion": LEGACY, "capabilities": {}, "clientInfo": {"name": "c", "version": "1"}}
        response = post(public, {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params})
        assert response.status_code == 200
        result = response.json()["result"]
        assert result["protocolVersion"] == LEGACY
        assert result["capabilities"] == {"tools": {"listChanged": False}}
        assert result["serverInfo"]["name"] == "agent-workflow-service"
        assert "Mcp-Session-Id" not in response
        acknowledged = post(public, {"jsonrpc": "2.0", "method": "notifications/initialized"})
        assert (acknowledged.status_code, acknowledged.content) == (202, b"")

    def test_an_unknown_version_is_offered_ours(self, public):
        body = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {"protocolVersion": "1999-01-01"}}
        assert post(public, body).json()["result"]["protocolVersion"] == LEGACY

    def test_ping(self, public):
        assert rpc(public, "ping").json() == {"jsonrpc": "2.0", "id": 1, "result": {}}

    def test_without_a_version_header(self, public):
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
        assert len(post(public, body).json()["result"]["tools"]) == len(TOOLS)

    def test_unknown_methods_and_tools(self, public):
        assert error_of(rpc(public, "resources/list"), 200, -32601)["id"] == 1
        error_of(rpc(public, "server/discover"), 200, -32601)
        error_of(rpc(public, "tools/call", {"name": "rm"}), 200, -32602)

    def test_another_version_header(self, public):
        error = error_of(rpc(public, "ping", **{"MCP-Protocol-Version": "2024-11-05"}), 400, -32022)["error"]
        assert error["data"] == {"supported": [MODERN, LEGACY], "requested": "2024-11-05"}


class TestModern:
    def test_discover(self, public):
        result = modern(public, "server/discover").json()["result"]
        assert result["supportedVersions"] == [MODERN, LEGACY]
        assert result["resultType"] == "complete"
        assert result["_meta"]["io.modelcontextprotocol/serverInfo"]["version"] == "1.0.0"

    def test_list_and_call(self, public):
        tools = modern(public, "tools/list").json()["result"]
        assert {tool["name"] for tool in tools["tools"]} == set(TOOLS)
        assert tools["cacheScope"] == "public"
        result = modern(public, "tools/call", {"name": "get_credits", "arguments": {}}).json()["result"]
        assert result["structuredContent"] == {"balance": "100", "held": "0", "available": "100"}

    @pytest.mark.parametrize(
        "headers",
        [
            {"MCP-Protocol-Version": LEGACY},
            {"MCP-Protocol-Version": ""},
            {"Mcp-Method": "tools/list"},
            {"Mcp-Method": ""},
            {"Mcp-Name": "list_chats"},
            {"Mcp-Name": ""},
            {"Mcp-Name": "=?base64?!?="},
        ],
    )
    def test_headers_that_disagree(self, public, headers):
        response = modern(public, "tools/call", {"name": "get_credits", "arguments": {}}, **headers)
        error_of(response, 400, -32020)

    def test_a_name_in_base64(self, public):
        headers = {"Mcp-Name": "=?base64?Z2V0X2NyZWRpdHM=?="}
        assert modern(public, "tools/call", {"name": "get_credits"}, **headers).status_code == 200

    def test_versions(self, public):
        meta = ENVELOPE | {VERSION_KEY: "2027-01-01"}
        response = modern(public, "tools/list", {"_meta": meta}, **{"MCP-Protocol-Version": "2027-01-01"})
        assert error_of(response, 400, -32022)["error"]["data"]["supported"] == [MODERN, LEGACY]

    @pytest.mark.parametrize("meta", [None, {}, {VERSION_KEY: MODERN}, "text", 3])
    def test_a_missing_envelope(self, public, meta):
        assert error_of(modern(public, "tools/list", {"_meta": meta}), 400, -32602)["id"] == "a"

    @pytest.mark.parametrize("method", ["initialize", "ping", "nonsense", "subscriptions/listen"])
    def test_unknown_methods(self, public, method):
        error_of(modern(public, method), 404, -32601)

    def test_unknown_tools_and_bad_params(self, public):
        error_of(modern(public, "tools/call", {"name": "rm"}), 400, -32602)
        error_of(modern(public, "tools/call", {"name": "get_credits", "arguments": []}), 400, -32602)


@pytest.mark.parametrize("version", [MODERN, LEGACY])
class TestMessages:
    @pytest.mark.parametrize("body", [b"{", b"\xff", b"", b'{"a": 1, "a": 2}', b"[" * 100_000])
    def test_no_json(self, public, version, body):
        assert error_of(post(public, body, **{"MCP-Protocol-Version": version}), 400, -32700)["id"] is None

    @pytest.mark.parametrize(
        "body",
        [
            [],
            [{"jsonrpc": "2.0", "id": 1, "method": "ping"}],
            3,
            None,
            {"id": 1, "method": "ping"},
            {"jsonrpc": "1.0", "id": 1, "method": "ping"},
            {"jsonrpc": "2.0", "id": 1, "result": {}},
            {"jsonrpc": "2.0", "id": 1, "method": 3},
            {"jsonrpc": "2.0", "id": None, "method": "ping"},
            {"jsonrpc": "2.0", "id": 1.5, "method": "ping"},
            {"jsonrpc": "2.0", "id": True, "method": "ping"},
            {"jsonrpc": "2.0", "id": {}, "method": "ping"},
        ],
    )
    def test_no_request(self, public, version, body):
        error_of(post(public, body, **{"MCP-Protocol-Version": version}), 400, -32600)

    def test_params_that_are_no_object(self, public, version):
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": [1]}
        error_of(post(public, body, **{"MCP-Protocol-Version": version}), 400, -32602)

    def test_a_notification(self, public, version):
        body = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 1}}
        response = post(public, body, **{"MCP-Protocol-Version": version})
        assert (response.status_code, response.content) == (202, b"")


# --- HTTP ------------------------------------------------------------------------------------------------------------
class TestHttp:
    def envelope(self, response: Any, status: int, code: str) -> None:
        assert response.status_code == status, response.content
        assert response.json()["error"]["code"] == code
        assert response["X-Request-Id"]

    def test_credentials(self, user, session):
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
        key, secret = create_key(user, name="gone")
        revoke_key(key)
        revoked = APIClient()
        revoked.credentials(HTTP_AUTHORIZATION=f"Bearer {secret}")
        for client in (APIClient(), session, revoked):
            response = post(client, body)
            self.envelope(response, 401, "UNAUTHORIZED")
            assert response["WWW-Authenticate"] == "Bearer"

    @pytest.mark.parametrize("method", ["GET", "DELETE", "PUT", "PATCH", "OPTIONS"])
    def test_other_methods(self, public, method):
        response = public.generic(method, URL)
        self.envelope(response, 405, "METHOD_NOT_ALLOWED")
        assert response["Allow"] == "POST"

    def test_media_types(self, public):
        self.envelope(post(public, b"{}", content_type="text/plain"), 415, "UNSUPPORTED_MEDIA_TYPE")
        self.envelope(post(public, b"{}", Accept="image/png"), 406, "NOT_ACCEPTABLE")

    def test_size(self, public):
        body = b'{"jsonrpc": "2.0", "method": "' + b"x" * settings.API_MAX_BODY_BYTES + b'"}'
        self.envelope(post(public, body), 413, "PAYLOAD_TOO_LARGE")

    def test_origins(self, public, settings):
        body = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
        settings.MCP_ALLOWED_ORIGINS = ["https://app.example.com"]
        for origin in (settings.BASE_URL, "https://app.example.com"):
            assert post(public, body, Origin=origin).status_code == 200
        for origin in ("https://evil.example", "null", "https://app.example.com.evil.example", ""):
            self.envelope(post(public, body, Origin=origin), 403, "FORBIDDEN")

    def test_rate_limit(self, public, monkeypatch):
        monkeypatch.setattr(ratelimit, "charge", lambda *buckets: Verdict(False, 300, 0, 60, 7))
        response = rpc(public, "ping")
        self.envelope(response, 429, "RATE_LIMITED")
        assert response["Retry-After"] == "7"


# --- the tools -------------------------------------------------------------------------------------------------------
class TestTools:
    def test_every_schema_is_one(self, public):
        from jsonschema import Draft202012Validator

        for tool in rpc(public, "tools/list").json()["result"]["tools"]:
            Draft202012Validator.check_schema(tool["inputSchema"])
            assert tool["inputSchema"]["type"] == "object"
            assert set(tool["inputSchema"].get("required", ())) <= set(tool["inputSchema"]["properties"])

    @pytest.mark.parametrize(("name", "scope"), TOOLS.items())
    def test_each_needs_its_scope(self, user, name, scope):
        others = factories.public_client(user, [other for other in DEFAULT_SCOPES if other != scope])
        error = refused(others, name)
        assert (error["code"], error["details"]) == ("FORBIDDEN", {"requiredScope": scope})
        alone = call(factories.public_client(user, [scope]), name)
        assert alone["structuredContent"].get("error", {}).get("code") != "FORBIDDEN"

    @pytest.mark.parametrize(
        ("name", "arguments"),
        [
            ("start_run", {"message": "Hello"}),
            ("get_run", {}),
            ("cancel_run", {}),
            ("respond_to_waitpoint", {"kind": "CLARIFICATION", "answer": "x"}),
        ],
    )
    def test_anothers_object_is_as_if_it_did_not_exist(self, public, name, arguments):
        strangers, nobodys = build(factories.UserFactory()).ids, unknown_ids()
        answers = [refused(public, name, **ids, **arguments) for ids in (strangers, nobodys)]
        assert answers[0] == answers[1]
        assert answers[0]["code"] == "NOT_FOUND"
        for odd in ("\x7f", "x" * 5000, "run_' OR 1=1", "..%2F"):
            ids = dict.fromkeys(nobodys, odd)
            assert refused(public, name, **ids, **arguments)["code"] == "NOT_FOUND"

    def test_chats(self, public):
        made = [done(public, "create_chat", title=f"T{number}")["id"] for number in range(3)]
        page = done(public, "list_chats", limit=2)
        assert [chat["id"] for chat in page["items"]] == made[:0:-1]
        rest = done(public, "list_chats", limit=2, cursor=page["nextCursor"])
        assert [chat["id"] for chat in rest["items"]] == made[:1]
        assert rest["nextCursor"] is None
        assert "title" in refused(public, "create_chat", title="")["details"]["fields"]
        assert "cursor" in refused(public, "list_chats", cursor="%")["details"]["fields"]
        assert "limit" in refused(public, "list_chats", limit=0)["details"]["fields"]

    def test_start_get_cancel(self, public, nudges):
        chat = done(public, "create_chat")["id"]
        run = done(public, "start_run", chatId=chat, message="Hello", maxCredits=0.5)
        assert (run["status"], run["chatId"], run["answer"]) == ("queued", chat, None)
        assert Run.objects.get(pk=run["id"]).max_credits == 500_000
        assert done(public, "get_run", runId=run["id"])["id"] == run["id"]
        assert refused(public, "start_run", chatId=chat, message="Again")["code"] == "RUN_IN_PROGRESS"
        assert done(public, "cancel_run", runId=run["id"])["status"] == "cancelled"
        assert done(public, "cancel_run", runId=run["id"])["status"] == "cancelled"

    @pytest.mark.parametrize(
        ("arguments", "field"),
        [
            ({}, "chatId"),
            ({"chatId": 3}, "chatId"),
            ({"waitSeconds": -1}, "waitSeconds"),
            ({"waitSeconds": 61}, "waitSeconds"),
            ({"waitSeconds": "1"}, "waitSeconds"),
            ({"waitSeconds": True}, "waitSeconds"),
            ({"message": ""}, "message"),
            ({"message": 3}, "message"),
            ({"tools": ["nonsense"]}, "tools.0"),
            ({"maxCredits": 0}, "maxCredits"),
            ({"onActiveRun": "queue"}, "onActiveRun"),
        ],
    )
    def test_what_start_run_refuses(self, user, public, arguments, field):
        chat = factories.ChatFactory(user=user)
        given = {"chatId": chat.pk, "message": "Hello"} | arguments if arguments else {"message": "Hello"}
        error = refused(public, "start_run", **given)
        assert error["code"] == "VALIDATION_ERROR"
        assert field in error["details"]["fields"]
        assert not Run.objects.exists()

    def test_the_same_call_with_a_key_makes_nothing_more(self, public):
        first = done(public, "create_chat", title="T", idempotencyKey="a")
        assert done(public, "create_chat", idempotencyKey="a", title="T") == first
        assert Chat.objects.count() == 1
        given = {"chatId": first["id"], "message": "Hello", "idempotencyKey": "b"}
        run = done(public, "start_run", **given)
        assert done(public, "start_run", **given, waitSeconds=0) == run
        assert done(public, "cancel_run", runId=run["id"])["status"] == "cancelled"
        # The run of the first call, as it is now.
        assert done(public, "start_run", **given, waitSeconds=5)["status"] == "cancelled"
        assert Run.objects.count() == 1

    def test_a_key_is_for_one_call(self, user, public):
        chat = factories.ChatFactory(user=user)
        given = {"chatId": chat.pk, "idempotencyKey": "a", "onActiveRun": "enqueue"}
        first = done(public, "start_run", **given, message="Hello")
        assert refused(public, "start_run", **given, message="Bye")["code"] == "IDEMPOTENCY_KEY_REUSED"
        assert refused(public, "create_chat", idempotencyKey="a")["code"] == "IDEMPOTENCY_KEY_REUSED"
        stranger = factories.public_client(factories.UserFactory())
        assert done(stranger, "create_chat", idempotencyKey="a")
        assert done(public, "start_run", **given | {"idempotencyKey": "b"}, message="Hello")["id"] != first["id"]
        # The header of the API is another matter.
        headers = {"Idempotency-Key": "a"}
        assert public.post("/api/public/v1/chats", {}, format="json", headers=headers).status_code == 201

    def test_a_call_that_was_refused_frees_its_key(self, user, public):
        chat = factories.ChatFactory(user=user)
        running = done(public, "start_run", chatId=chat.pk, message="Hello")
        given = {"chatId": chat.pk, "message": "Again", "idempotencyKey": "a"}
        assert refused(public, "start_run", **given)["code"] == "RUN_IN_PROGRESS"
        done(public, "cancel_run", runId=running["id"])
        assert done(public, "start_run", **given)["status"] == "queued"

    @pytest.mark.parametrize("key", ["", "x" * 256, "ключ", "\t", 5, None])
    def test_what_is_no_key(self, public, key):
        assert "idempotencyKey" in refused(public, "create_chat", idempotencyKey=key)["details"]["fields"]
        assert not Chat.objects.exists()

    def test_starts_are_limited(self, user, public, monkeypatch):
        charged: list[str] = []

        def charge(*buckets: ratelimit.Bucket) -> Verdict:
            charged.extend(bucket.name.partition(":")[0] for bucket in buckets)
            return Verdict(not any(bucket.name.startswith("run-starts") for bucket in buckets), 60, 0, 60, 9)

        monkeypatch.setattr(ratelimit, "charge", charge)
        chat = factories.ChatFactory(user=user)
        assert refused(public, "start_run", chatId=chat.pk, message="Hello")["code"] == "RATE_LIMITED"
        assert charged == ["public", "run-starts"]
        assert not Run.objects.exists()

    def test_respond(self, user, public):
        waitpoint = factories.WaitpointFactory(run__chat__user=user)
        Chat.objects.filter(pk=waitpoint.run.chat_id).update(active_run_id=waitpoint.run_id)
        wrong = refused(public, "respond_to_waitpoint", waitpointId=waitpoint.pk, kind="CREDIT_APPROVAL", approved=True)
        assert "kind" in wrong["details"]["fields"]
        given = {"waitpointId": waitpoint.pk, "kind": "CLARIFICATION", "answer": "blue"}
        first = done(public, "respond_to_waitpoint", **given)
        assert (first["status"], first["resolvedPayload"]["answer"]) == ("COMPLETED", "blue")
        assert done(public, "respond_to_waitpoint", **given | {"answer": "red"}) == first

    def test_no_credits(self, user, public):
        fund(user, 0)
        chat = factories.ChatFactory(user=user)
        error = refused(public, "start_run", chatId=chat.pk, message="Hello")
        assert (error["code"], error["details"]) == ("INSUFFICIENT_CREDITS", {"available": "0"})
