"""All servers outside the service, on one loopback port: a tool, a model provider, a webhook receiver, a collector
of traces (OTLP/HTTP), and a Sentry.
"""

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from tests.http_server import serving

# Unique strings that may appear only in the places that are meant for them.
MESSAGE, TOOL_OUTPUT, TOOL_SECRET = "canary-message-1f", "canary-output-2e", "canary-header-3d"
MODEL_OUTPUT, MODEL_KEY, EXCEPTION = "canary-model-4c", "canary-key-5b", "canary-exception-6a"
WRONG_CREDENTIAL, RECEIVER_ANSWER, MODEL_ERROR = "canary-wrong-79", "canary-answer-88", "canary-refusal-97"
FILE, FILE_NAME = "canary-file-a6", "canary-name-b5"
CANARIES = (
    *(MESSAGE, TOOL_OUTPUT, TOOL_SECRET, MODEL_OUTPUT, MODEL_KEY, EXCEPTION),
    *(WRONG_CREDENTIAL, RECEIVER_ANSWER, MODEL_ERROR, FILE, FILE_NAME),
)


class Outside:
    def __init__(self, url: str) -> None:
        self.url = url
        self.requests: list[tuple[str, bytes]] = []

    def bodies(self, path: str) -> list[bytes]:
        return [body for asked, body in list(self.requests) if asked.startswith(path)]

    def spans(self) -> list[dict[str, Any]]:
        found = []
        for body in self.bodies("/v1/traces"):
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                service = {item.key: item.value.string_value for item in resource.resource.attributes}["service.name"]
                for scope in resource.scope_spans:
                    found += [
                        {
                            "name": span.name,
                            "trace": span.trace_id.hex(),
                            "id": span.span_id.hex(),
                            "parent": span.parent_span_id.hex(),
                            "service": service,
                            "error": span.status.message,
                            **{item.key: item.value.string_value for item in span.attributes},
                        }
                        for span in scope.spans
                    ]
        return found

    def reports(self) -> list[dict[str, Any]]:
        """The events that Sentry received."""
        lines = [line for body in self.bodies("/api/1/envelope/") for line in body.splitlines()]
        return [event for line in lines if "event_id" in (event := json.loads(line)) and "level" in event]


def answer_to(path: str, body: bytes) -> tuple[int, str, bytes]:
    if path == "/tool":
        return 200, "application/json", json.dumps({"result": TOOL_OUTPUT}).encode()
    if path == "/broken-tool":
        return 500, "text/plain", TOOL_OUTPUT.encode()
    if path == "/hook":
        return 500, "text/plain", RECEIVER_ANSWER.encode()
    if path == "/v1/traces":
        return 200, "application/x-protobuf", ExportTraceServiceResponse().SerializeToString()
    if path == "/model/chat/completions":
        if b'"broken"' in body:
            return 400, "application/json", json.dumps({"error": {"message": MODEL_ERROR}}).encode()
        chunk = {"choices": [{"index": 0, "delta": {"content": MODEL_OUTPUT}, "finish_reason": "stop"}]}
        return 200, "text/event-stream", f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode()
    return 200, "application/json", b"{}"


@contextmanager
def outside() -> Iterator[Outside]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            world.requests.append((self.path, body))
            status, kind, answer = answer_to(self.path, body)
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args: object) -> None:
            pass

    with serving(Handler) as url:
        world = Outside(url)
        yield world
