"""An MCP server whose answer has a million values of a wrong type costs an error and little time."""

import contextlib
import json
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from runs.tools.base import ToolFailure
from runs.tools.mcp import transport
from tests.http_server import serving
from tests.tools.conftest import http_tool

RESULTS = {
    "initialize": {
        "protocolVersion": "2025-06-18",
        "capabilities": {"tools": {}},
        "serverInfo": {"name": "liar", "version": "1"},
    },
    "tools/list": {"tools": [{"name": "lie", "inputSchema": {"type": "object"}}]},
}


@pytest.fixture
def liar() -> Iterator[Any]:
    """A server; ``content`` is the content of the result of its tool, as an event if ``as_event``. ``structured`` is
    its structured content.
    """

    class Handler(BaseHTTPRequestHandler):
        content: Any = []
        structured: Any = None
        as_event = False
        headers_too: Any = ()

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            result = RESULTS.get(asked["method"])
            if asked["method"] == "tools/call":
                result = {"content": self.content, "structuredContent": self.structured}
            answer: dict[str, Any] = {"jsonrpc": "2.0", "id": asked.get("id")}
            answer |= {"error": {"code": -32601, "message": "no"}} if result is None else {"result": result}
            body = json.dumps(answer, separators=(",", ":")).encode()
            kind = "text/event-stream" if self.as_event else "application/json"
            if self.as_event:
                body = b': "\r\ndata: ' + body + b"\n\n"
            self.send_response(200 if "id" in asked else 202)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            for header in self.headers_too:
                self.send_header(*header)
            self.end_headers()
            self.wfile.write(body)

        def do_DELETE(self) -> None:
            self.send_error(405)

        do_GET = do_DELETE

        def log_message(self, *args: Any) -> None:
            pass

    with serving(Handler) as Handler.url:  # type: ignore[attr-defined]
        yield Handler


@pytest.mark.parametrize("as_event", [False, True])
@pytest.mark.parametrize("value", [1, {"type": "text", "text": ""}, []], ids=["number", "block", "list"])
def test_too_many_values_are_an_error(call, liar, value: Any, as_event: bool) -> None:
    liar.content, liar.as_event = [value] * 30_000, as_event
    definition = http_tool(f"{liar.url}/mcp", name="lie", node_type="mcp")
    begun = time.process_time()
    with pytest.raises(ToolFailure, match="values"):
        call(definition, {})
    assert time.process_time() - begun < 5


@pytest.mark.parametrize("place", ["Zürich", "Zürich".encode().decode("latin-1")], ids=["latin-1", "utf-8"])
def test_a_header_may_have_any_characters(call, liar, place: str) -> None:
    liar.content, liar.headers_too = [{"type": "text", "text": "done"}], [("X-Place", place)]
    assert call(http_tool(f"{liar.url}/mcp", name="lie", node_type="mcp"), {}).text == "done"


def test_a_long_content_type_is_not_read(call, liar) -> None:
    """To read one takes the event loop a time that grows faster than its length."""
    liar.as_event, liar.headers_too = True, [("Content-Type", ";" * 60_000)]
    with pytest.raises(ToolFailure, match="content type"):
        call(http_tool(f"{liar.url}/mcp", name="lie", node_type="mcp"), {})


@pytest.mark.parametrize(
    ("name", "rule"),
    [("a" * 27 + "!", {"pattern": "^(a+)+$"}), ("", {"$ref": "#/$defs/d20"})],
    ids=["pattern", "references"],
)
def test_a_result_is_not_checked_against_the_servers_own_schema(call, liar, monkeypatch, name, rule) -> None:
    """The check would stop the event loop of all requests for minutes."""
    parts = {f"d{depth}": {"allOf": [{"$ref": f"#/$defs/d{depth - 1}"}] * 2} for depth in range(1, 21)}
    schema = {"type": "object", "properties": {"name": rule}, "$defs": parts | {"d0": {"type": "string"}}}
    tool = {"name": "lie", "inputSchema": {"type": "object"}, "outputSchema": schema}
    monkeypatch.setitem(RESULTS, "tools/list", {"tools": [tool]})
    liar.content, liar.structured = [{"type": "text", "text": "done"}], {"name": name}
    begun = time.process_time()
    assert call(http_tool(f"{liar.url}/mcp", name="lie", node_type="mcp"), {}).text == "done"
    assert time.process_time() - begun < 5


def test_values_are_counted_outside_of_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "VALUES_MAX", 0)
    body = b'{"a": [1, 2, "x, \\", y\\\\", {}], "b\\\\\\"": ", ,", "c": [1,\n2]}\r\n: it is "quoted, here\ndata: [1, 2]'
    assert transport.count_values(body) == 7


@pytest.mark.parametrize("kind", ["http", "mcp"])
@pytest.mark.parametrize(
    ("head", "forever"),
    [
        (b"", b"HTTP/1.1 102 Processing\r\n\r\n"),
        (b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n:\r\n"),
        (b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n", b"\n"),
    ],
    ids=["interim", "chunks", "lines"],
)
def test_an_answer_that_says_nothing_is_soon_an_error(call: Any, kind: str, head: bytes, forever: bytes) -> None:
    """It does not take the time of the call, in which it would hold up the other calls of the event loop."""

    class Handler(BaseHTTPRequestHandler):
        sent = 0

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            with contextlib.suppress(OSError):
                self.wfile.write(head)
                while True:
                    self.wfile.write(forever * 1000)
                    Handler.sent += 1000 * len(forever)

        def log_message(self, *args: Any) -> None:
            pass

    with serving(Handler) as url:
        with pytest.raises(ToolFailure) as caught:
            call(http_tool(url, name="lie", node_type=kind, timeout_seconds=60.0), {})
        assert caught.value.code == "TOOL_ERROR"
    assert Handler.sent < 16 * 1024 * 1024, "with what the buffers of the connection hold"
