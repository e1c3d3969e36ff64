"""A webhook receiver for development: verifies each delivery as docs/webhooks.md says, and prints it."""

import json
import time
from argparse import ArgumentParser
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from webhooks.signing import VerificationFailed, verify


class Command(BaseCommand):
    help = "Receive webhooks on 127.0.0.1: verify the signatures and the timestamp, print each event, answer 200."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--port", type=int, default=9000, help="default 9000; 0 takes any free one")
        parser.add_argument("--secret", help="the endpoint's secret; without it nothing is verified")

    def handle(self, *args: Any, **options: Any) -> None:
        out, secret = self.stdout, options["secret"]

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 10  # seconds, for each read

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, line = judge(dict(self.headers.items()), body, secret)
                out.write("".join(sign if sign.isprintable() else "?" for sign in line))
                out.flush()
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        try:
            server = ThreadingHTTPServer(("127.0.0.1", options["port"]), Handler)
        except (OSError, OverflowError) as error:
            raise CommandError(f"Can't listen on port {options['port']}: {error}.") from None
        out.write(f"Listening on http://127.0.0.1:{server.server_port}/ (Ctrl-C ends it)")
        if not secret:
            out.write("No --secret given: deliveries are shown, but not verified.")
        out.flush()
        with server, suppress(KeyboardInterrupt):
            server.serve_forever(poll_interval=0.2)


def judge(headers: dict[str, str], body: bytes, secret: str | None) -> tuple[int, str]:
    """The status to answer with, and the line to print."""
    attempt, moment = headers.get("X-Service-Delivery-Attempt", "?"), time.strftime("%H:%M:%S")
    if secret:
        try:
            verify(headers, body, secret, time.time())
        except (VerificationFailed, ValueError) as error:
            return 400, f"{moment}  REFUSED  {error}"
    try:
        event = json.loads(body)
        del event["id"], event["occurredAt"]
        line = f"{event.pop('type'):<15}" + "".join(f"  {key}={value}" for key, value in event.items())
    except (ValueError, TypeError, KeyError, AttributeError):
        return 400, f"{moment}  REFUSED  the body is not an event"
    return 200, f"{moment}  {line}  (attempt {attempt}, {'verified' if secret else 'not verified'})"
