"""Tests of MCP tools, against a server of the official SDK in a separate process and against faulty servers."""

import asyncio
import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from django.core.files.storage import default_storage
from django.test import override_settings

from config.kernel.jsontext import from_text
from config.outbound import addresses
from config.outbound.loop import shared
from runs.tools import mcp
from runs.tools.base import ToolDefinition, ToolFailure, ToolResult
from runs.tools.dispatch import call_tool
from runs.tools.files import stored_image
from runs.tools.mcp.transport import GuardedTransport
from runs.tools.questions import Dialogue
from tests.stack.process import Process, free_port, python, wait_for
from tests.tiers import slow
from tests.tools.conftest import Server, http_tool
from tests.tools.mcp_server import PNG


def accepts(port: int) -> bool:
    import socket

    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module", params=["newest", "legacy"])
def address(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an MCP server, once for each revision of the protocol."""
    port = free_port()
    log: Path = tmp_path_factory.mktemp("mcp") / "server.log"
    process = Process("mcp", python("-m", "tests.tools.mcp_server", str(port), request.param), log=log)
    process.start()
    try:
        wait_for(lambda: process.check() or accepts(port), 30, "the MCP server's start")
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()


@pytest.fixture
def is_legacy(request: pytest.FixtureRequest) -> bool:
    return "legacy" in request.node.callspec.id


def tool(url: str, name: str, **columns: Any) -> ToolDefinition:
    return http_tool(url, name=name, node_type="mcp", **columns)


def failure(call: Callable[..., ToolResult], *args: Any) -> ToolFailure:
    with pytest.raises(ToolFailure) as caught:
        call(*args)
    return caught.value


class TestAgainstTheSdk:
    def test_a_call(self, call, address):
        result = call(tool(address, "add"), {"a": 40, "b": 2})
        assert (result.text, result.urls, result.credit_used) == ("42", (), None)

    def test_a_complete_result_stays_if_the_connection_cannot_be_closed(self, call, address, monkeypatch):
        async def lost(transport: GuardedTransport) -> None:
            raise OSError("The connection is lost.")

        monkeypatch.setattr(GuardedTransport, "aclose", lost)
        assert call(tool(address, "add"), {"a": 40, "b": 2}).text == "42"

    def test_the_servers_own_name(self, call, address):
        assert call(tool(address, "nice_name", remote_name="remote.name"), {}).text == "by its own name"

    def test_headers(self, call, address):
        secret = {"Authorization": "Bearer sesame"}
        headers = json.loads(call(tool(address, "headers", secret_headers=secret), {}).text)
        assert headers["authorization"] == "Bearer sesame"
        assert headers["idempotency-key"] == "inv_1"
        assert headers["accept-encoding"] == "identity"

    def test_links_and_binary_content(self, call, address):
        """Images are stored for models and users, unless their bytes do not agree with their type."""
        result = call(tool(address, "report"), {})
        chart, *images = result.urls
        assert chart == "https://files.example/chart.svg"
        for number, url in enumerate(images, 1):
            stored_name, name, kind = stored_image("inv_1", url)
            assert (name, kind) == (f"image-{number}.png", "image/png")
            assert default_storage.open(stored_name).read() == PNG
        assert result.text.splitlines() == [
            "Here it is.",
            "chart: https://files.example/chart.svg",
            "note: note://1",
            "[image/png, which is not text]",
            "[application/pdf, which is not text]",
            "[resource, which is not text]",
            "[image-1.png]",
            "[image-2.png]",
        ]

    def test_no_more_images_are_stored_than_a_result_may_have(self, call, address, monkeypatch, storage):
        monkeypatch.setattr("runs.tools.base.TOOL_RESULT_URLS_MAX", 1)
        assert "more than 1 result URLs" in failure(call, tool(address, "report"), {}).message
        assert len(list(storage.rglob("*.png"))) == 1

    def test_an_answer_in_a_stream(self, call, address):
        assert call(tool(address, "with_progress"), {}).text == "streamed"

    def test_an_error_of_the_tool(self, call, address):
        error = failure(call, tool(address, "fail"), {"reason": "out of paper"})
        assert error.code == "TOOL_ERROR"
        assert "out of paper" in error.message

    def test_wrong_arguments(self, call, address):
        assert failure(call, tool(address, "add"), {"a": "x"}).code == "TOOL_ERROR"

    @pytest.mark.parametrize("name", ["fail", "refuse"])
    def test_an_error_shows_no_secret(self, call, address, name):
        secret = {"X-Api-Key": "0123456789ab"}
        error = failure(call, tool(address, name, secret_headers=secret), {"reason": "x" * 990 + "0123456789ab"})
        assert "xx" in error.message
        assert "012345" not in error.message

    def test_an_unknown_tool(self, call, address):
        assert failure(call, tool(address, "subtract"), {}).message == "The server of subtract has no tool subtract."

    def test_call_ends_at_its_time_limit(self, call, address):
        began = time.monotonic()
        error = failure(call, tool(address, "slow", timeout_seconds=0.5), {"seconds": 60})
        assert error.code == "TOOL_TIMEOUT"
        assert time.monotonic() - began < 30

    def test_a_cancelled_call_ends(self, context, address):
        async def main() -> None:
            task = asyncio.create_task(call_tool(tool(address, "slow"), {"seconds": 60}, context))
            await asyncio.sleep(0.5)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(task, 10)

        asyncio.run(main())
        loop = shared.loop
        assert loop is not None
        wait_for(lambda: not [task for task in asyncio.all_tasks(loop) if "call" in repr(task.get_coro())], 10)

    def test_an_answer_that_is_too_large(self, call, address):
        with override_settings(TOOL_ANSWER_MAX_BYTES=50_000):
            error = failure(call, tool(address, "large"), {"size": 60_000})
            assert error.code == "TOOL_ERROR"
            assert "50000 bytes" in error.message
            assert len(call(tool(address, "large"), {"size": 20_000}).text) == 20_000

    def test_many_concurrent_calls(self, context, address):
        async def main() -> list[ToolResult]:
            calls = (call_tool(tool(address, "add"), {"a": n, "b": 1}, context) for n in range(10))
            return await asyncio.gather(*calls)

        assert [result.text for result in asyncio.run(main())] == [str(n + 1) for n in range(10)]


class TestTasks:
    """The newest revision has tasks and questions, an older one refuses such calls."""

    def test_a_task_that_asks(self, call, address, context, is_legacy):
        definition = tool(address, "research", park_seconds=3600)
        if is_legacy:
            assert "capability" in failure(call, definition, {"topic": "bees", "seconds": 0}).message
            return

        def look(text: str, end_reason: str = "") -> Any:
            of_call = dataclasses.replace(context, remote_task=text, end_reason=end_reason)
            return asyncio.run(mcp.contact(definition, of_call))

        parked = call(definition, {"topic": "bees", "seconds": 0.3, "asks": True})
        seen = look(parked.remote_task)
        assert (seen.message, seen.contact_in_seconds) == ("Reading", 1.0)
        wait_for(lambda: look(parked.remote_task).contact_in_seconds is None, 20)
        dialogue = Dialogue.from_text(look(parked.remote_task).remote_task)
        assert dialogue.question is not None
        assert dialogue.question.text == "For whom?"
        assert look(dialogue.with_answer({"name": "Ada"}).to_text()) == ToolResult("All about bees, for Ada")
        assert look(parked.remote_task, "run_cancelled") is None
        assert failure(lambda: look(parked.remote_task)).message == "research was cancelled by its server."

    def test_a_call_that_asks(self, call, address, is_legacy, context):
        if is_legacy:
            assert failure(call, tool(address, "greet"), {}).code == "TOOL_ERROR"
            return
        asked = call(tool(address, "greet"), {})
        dialogue = Dialogue.from_text(asked.remote_task)
        for data, text in (({"name": "Bob"}, "Hello Bob"), (None, "Hello nobody")):
            again = dataclasses.replace(context, remote_task=dialogue.with_answer(data).to_text())
            assert call(tool(address, "greet"), {}, again).text == text


class TestAddresses:
    def test_private_addresses_are_refused(self, call, server: Server):
        with override_settings(OUTBOUND_ALLOW_PRIVATE=False):
            for url in (f"{server.url}/mcp", "http://[::1]:9/", "http://169.254.169.254/", "http://0177.1:9/"):
                error = failure(call, tool(url, "add"), {})
                assert (error.code, error.message) == ("TOOL_ERROR", "add: The host's address is not public.")
        assert not server.received

    def test_host_name_is_resolved_and_checked_once_per_connection(self, call, server: Server, monkeypatch):
        port = int(server.url.rpartition(":")[2])
        looked_up: list[str] = []

        def answer(host: str, port: int) -> list[Any]:
            looked_up.append(host)
            # The first look-up gives a public address. The next one, after the disconnect, gives a private one.
            return [(addresses.socket.AF_INET, ("127.0.0.1" if len(looked_up) == 1 else "127.0.0.2", port))]

        monkeypatch.setattr(addresses, "_getaddrinfo", answer)
        monkeypatch.setattr(addresses, "is_public", lambda address: str(address) == "127.0.0.1")
        server.status, server.body = 500, b"{}"
        with override_settings(OUTBOUND_ALLOW_PRIVATE=False):
            error = failure(call, tool(f"http://tools.example:{port}/mcp", "add"), {})
        assert "not public" in error.message
        assert [received.headers["Host"] for received in server.received] == [f"tools.example:{port}"]
        assert looked_up == ["tools.example"] * 2

    def test_host_with_public_and_private_addresses_is_refused(self, call, monkeypatch):
        mixed = [(addresses.socket.AF_INET, (ip, 80)) for ip in ("93.184.215.14", "10.0.0.1")]
        monkeypatch.setattr(addresses, "_getaddrinfo", lambda host, port: mixed)
        with override_settings(OUTBOUND_ALLOW_PRIVATE=False):
            assert "not public" in failure(call, tool("http://tools.example/", "add"), {}).message

    @pytest.mark.parametrize("url", ["ftp://x/", "http://u:p@127.0.0.1/", "nonsense", "http://", "file:///etc/passwd"])
    def test_invalid_addresses_are_refused(self, call, url):
        assert failure(call, tool(url, "add"), {}).code == "TOOL_ERROR"

    def test_a_redirect_elsewhere_is_not_followed(self, call, server: Server):
        server.status, server.headers = 307, {"Location": "http://127.0.0.2:9/mcp"}
        assert failure(call, tool(f"{server.url}/mcp", "add"), {}).code == "TOOL_ERROR"
        assert {received.path for received in server.received} == {"/mcp"}


def test_each_digit_is_sent(server: Server):
    given = '{"n":123456789012345678901234567890,"d":[0.12345678901234567890123,-2.50]}'
    transport = GuardedTransport("")
    transport.call = {"arguments": from_text(given)}
    request = httpx2.Request("POST", server.url, json={"method": "tools/call", "params": {"name": "a"}})

    async def send() -> None:
        await (await transport.handle_async_request(request)).aread()

    shared.submit(send()).result(10)
    assert server.received[0].body.decode() == f'{{"method":"tools/call","params":{{"name":"a","arguments":{given}}}}}'


class TestBadServers:
    @pytest.mark.parametrize(
        ("status", "body"),
        [
            (200, b""),
            (200, b"{"),
            (200, b"[]"),
            (200, b"null"),
            (200, b'{"jsonrpc": "2.0", "id": 1, "result": []}'),
            *slow((200, b'{"jsonrpc": "2.0", "id": 99, "result": {}}')),
            (202, b""),
            (401, b"{}"),
            (404, b"{}"),
            (500, b"<html>"),
        ],
    )
    def test_invalid_answer(self, call, server: Server, status, body):
        server.status, server.body = status, body
        error = failure(call, tool(server.url, "add", timeout_seconds=3.0), {})
        assert error.code in ("TOOL_ERROR", "TOOL_TIMEOUT")
        if status >= 400:
            assert error.message == f"add answered with HTTP status {status}."

    def test_refused_connection(self, call):
        error = failure(call, tool(f"http://127.0.0.1:{free_port()}/mcp", "add"), {})
        assert error.message == "add: The connection was refused."

    def test_a_silent_server(self, call, server: Server):
        server.hold = True
        assert failure(call, tool(server.url, "add", timeout_seconds=0.5), {}).code == "TOOL_TIMEOUT"

    def test_a_compressed_answer(self, call, server: Server):
        server.headers, server.body = {"Content-Type": "application/json", "Content-Encoding": "gzip"}, b"\x1f\x8b"
        assert failure(call, tool(server.url, "add"), {}).message == "add: The answer is compressed."

    def test_no_secret_in_a_failure(self, call, server: Server):
        server.status = 500
        secret = {"Authorization": "Bearer sesame"}
        error = failure(call, tool(f"{server.url}/mcp?key=sesame", "add", secret_headers=secret), {})
        assert "sesame" not in error.message


def test_a_row_names_the_remote_tool():
    definition = dataclasses.replace(tool("http://127.0.0.1/", "a"), remote_name="b")
    assert definition.remote_name == "b"
