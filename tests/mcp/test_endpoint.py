"""Tests of POST /api/mcp with raw JSON-RPC: all revisions, the HTTP layer and invalid requests."""

from typing import Any

import pytest
from django.conf import settings
from rest_framework.test import APIClient

from apikeys.keys import create_key, revoke_key
from config.api import ratelimit
from config.api.ratelimit import Verdict
from config.kernel.errors import Unavailable
from runs.mcp import views
from tests.mcp.rpc import (
    ENVELOPE,
    HANDSHAKES,
    LEGACY,
    MODERN,
    TOOLS,
    URL,
    VERSION_KEY,
    VERSIONS,
    error_of,
    modern,
    post,
    rpc,
)

pytestmark = pytest.mark.django_db


# --- the revisions ---------------------------------------------------------------------------------------------------
class TestLegacy:
    @pytest.mark.parametrize("version", HANDSHAKES)
    def test_handshake(self, public, version):
        params = {"protocolVersion": version, "capabilities": {}, "clientInfo": {"name": "c", "version": "1"}}
        response = post(public, {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params})
        assert response.status_code == 200
        result = response.json()["result"]
        assert result["protocolVersion"] == version
        assert result["capabilities"] == {"tools": {"listChanged": False}}
        assert result["serverInfo"]["name"] == "agent-workflow-service"
        assert "Mcp-Session-Id" not in response
        acknowledged = post(public, {"jsonrpc": "2.0", "method": "notifications/initialized"})
        assert (acknowledged.status_code, acknowledged.content) == (202, b"")

    @pytest.mark.parametrize("asked", ["1999-01-01", "2024-11-05", MODERN, None, [], 3])
    def test_unknown_version_gets_the_newest(self, public, asked):
        body = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {"protocolVersion": asked}}
        assert post(public, body).json()["result"]["protocolVersion"] == LEGACY

    @pytest.mark.parametrize("version", HANDSHAKES)
    def test_ping(self, public, version):
        answer = rpc(public, "ping", **{"MCP-Protocol-Version": version})
        assert answer.json() == {"jsonrpc": "2.0", "id": 1, "result": {}}

    def test_without_a_version_header(self, public):
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
        assert len(post(public, body).json()["result"]["tools"]) == len(TOOLS)

    def test_unknown_methods_and_tools(self, public):
        assert error_of(rpc(public, "resources/list"), 200, -32601)["id"] == 1
        error_of(rpc(public, "server/discover"), 200, -32601)
        error_of(rpc(public, "tools/call", {"name": "rm"}), 200, -32602)

    def test_another_version_header(self, public):
        error = error_of(rpc(public, "ping", **{"MCP-Protocol-Version": "2024-11-05"}), 400, -32022)["error"]
        assert error["data"] == {"supported": VERSIONS, "requested": "2024-11-05"}


class TestModern:
    def test_discover(self, public):
        result = modern(public, "server/discover").json()["result"]
        assert result["supportedVersions"] == VERSIONS
        assert result["resultType"] == "complete"
        assert result["_meta"]["io.modelcontextprotocol/serverInfo"]["version"] == "1.0.0"

    def test_list_and_call(self, public):
        tools = modern(public, "tools/list").json()["result"]
        assert {tool["name"] for tool in tools["tools"]} == set(TOOLS)
        assert tools["cacheScope"] == "public"
        result = modern(public, "tools/call", {"name": "get_credits", "arguments": {}}).json()["result"]
        assert result["structuredContent"] == {"balance": "100", "held": "0", "available": "100", "expiring": []}

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
    def test_headers_that_contradict_the_body(self, public, headers):
        response = modern(public, "tools/call", {"name": "get_credits", "arguments": {}}, **headers)
        error_of(response, 400, -32020)

    def test_a_name_in_base64(self, public):
        headers = {"Mcp-Name": "=?base64?Z2V0X2NyZWRpdHM=?="}
        assert modern(public, "tools/call", {"name": "get_credits"}, **headers).status_code == 200

    def test_versions(self, public):
        meta = ENVELOPE | {VERSION_KEY: "2027-01-01"}
        response = modern(public, "tools/list", {"_meta": meta}, **{"MCP-Protocol-Version": "2027-01-01"})
        assert error_of(response, 400, -32022)["error"]["data"]["supported"] == VERSIONS

    @pytest.mark.parametrize("meta", [None, {}, {VERSION_KEY: MODERN}, "text", 3])
    def test_a_missing_envelope(self, public, meta):
        assert error_of(modern(public, "tools/list", {"_meta": meta}), 400, -32602)["id"] == "a"

    @pytest.mark.parametrize("method", ["initialize", "ping", "nonsense", "subscriptions/listen"])
    def test_unknown_methods(self, public, method):
        error_of(modern(public, method), 404, -32601)

    def test_unknown_tools_and_bad_params(self, public):
        error_of(modern(public, "tools/call", {"name": "rm"}), 400, -32602)
        error_of(modern(public, "tools/call", {"name": "get_credits", "arguments": []}), 400, -32602)


@pytest.mark.parametrize("version", VERSIONS)
class TestMessages:
    @pytest.mark.parametrize("body", [b"{", b"\xff", b"", b'{"a": 1, "a": 2}', b"[" * 100_000])
    def test_invalid_json(self, public, version, body):
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
    def test_invalid_request(self, public, version, body):
        error_of(post(public, body, **{"MCP-Protocol-Version": version}), 400, -32600)

    def test_params_must_be_an_object(self, public, version):
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

    @pytest.mark.parametrize("accept", ["text/event-stream", "application/json", "image/png", "nonsense"])
    def test_get_is_405_whatever_it_accepts(self, public, accept):
        response = public.get(URL, headers={"Accept": accept})
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

    @pytest.mark.parametrize(
        ("error", "status", "code"), [(Unavailable(), 503, "UNAVAILABLE"), (ValueError("hush"), 500, "INTERNAL_ERROR")]
    )
    def test_a_fault_of_the_service_is_no_result_of_a_tool(self, public, monkeypatch, error, status, code):
        def fail(*about: Any) -> None:
            raise error

        monkeypatch.setattr(views, "call_tool", fail)
        asked = {"name": "get_credits"}
        for answer in (rpc(public, "tools/call", asked), modern(public, "tools/call", asked)):
            self.envelope(answer, status, code)
            assert "hush" not in answer.text

    def test_rate_limit(self, public, monkeypatch):
        monkeypatch.setattr(ratelimit, "charge", lambda *buckets: Verdict(False, 300, 0, 60, 7))
        response = rpc(public, "ping")
        self.envelope(response, 429, "RATE_LIMITED")
        assert response["Retry-After"] == "7"
