"""A request as its bytes arrive: what the server accepts of a head, and the WSGI environment that Django gets."""

from __future__ import annotations

import json
import secrets
import sys
import tempfile
from functools import lru_cache
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote_to_bytes

import httptools

from config import settings
from config.api.ratelimit import address_of

# A very long id in a path must get 404 from Django.
REQUEST_LINE_MAX_BYTES = 64 * 1024
HEADER_MAX_BYTES = 16 * 1024  # a session token may have 16 KiB
HEADERS_MAX = 100
HEAD_MAX_BYTES = REQUEST_LINE_MAX_BYTES + 128 * 1024
# A chunk of one byte takes six bytes on the wire. More is padding that would be read without end.
CHUNKED_WIRE_FACTOR = 8
# The part of a body that is kept in memory while it arrives.
SPOOL_BYTES = 16 * 1024
UPLOADS = b"/uploads/"

CODES = {431: "HEADERS_TOO_LARGE", 500: "INTERNAL_ERROR", 503: "UNAVAILABLE"}
MESSAGES = {
    414: "The request line is too long.",
    417: "The server supports no expectation other than 100-continue.",
    431: "The request's headers are too large.",
    500: "Something went wrong on our side.",
    501: "The transfer coding is not supported.",
    503: "The server receives too much at the moment; try again.",
    505: "The server supports HTTP/1.1 and HTTP/1.0.",
}


class Refused(Exception):
    """The request is not passed to Django. ``status`` is the answer's."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def envelope(status: int) -> tuple[str, list[tuple[str, str]], bytes]:
    """The answer to a request that Django never sees, without the parser's message, which can quote the request."""
    error = {
        "code": CODES.get(status, "VALIDATION_ERROR"),
        "message": MESSAGES.get(status, "The request is not valid HTTP."),
    }
    headers = [("Content-Type", "application/json"), ("X-Content-Type-Options", "nosniff")]
    headers.append(("X-Request-Id", secrets.token_hex(16)))
    if settings.CORS_ALLOWED_ORIGINS:
        # For any origin: the header that names it may not have been read, and the text is the same for all.
        headers += [("Access-Control-Allow-Origin", "*"), ("Access-Control-Expose-Headers", "X-Request-Id")]
    return f"{status} {HTTPStatus(status).phrase}", headers, json.dumps({"error": error}).encode()


class Request:
    """A request whose head is complete. Raises Refused for a head that no server may accept or that ours does not.

    ``unread`` stands for a body that is larger than any view accepts. It is not read: Django answers by its announced
    length. ``address`` is the client's, if there is a body.
    """

    __slots__ = ("address", "body", "chunked", "environ", "keep_alive", "limit", "size", "unread", "version", "wire")

    def __init__(self, base: dict[str, Any], method: bytes, version: str, target: bytes, headers: list[Any]) -> None:
        path, query = split_target(target)
        self.version = version
        self.keep_alive = False
        self.size = self.wire = 0
        self.body: Any = None
        self.address = ""
        self.environ = environ = {
            **base,
            "REQUEST_METHOD": method.decode("ascii"),
            "RAW_URI": target.decode("latin1"),
            "PATH_INFO": unquote_to_bytes(path).decode("latin1"),
            "QUERY_STRING": query.decode("latin1"),
            "SERVER_PROTOCOL": f"HTTP/{version}",
        }
        for name, value in headers:
            # ``a_b`` and ``a-b`` would be the same variable, and a proxy in front removes only one of them.
            if b"_" not in name:
                variable, text = variable_of(name), value.decode("latin1").strip(" \t")
                environ[variable] = f"{environ[variable]},{text}" if variable in environ else text
        coding = environ.pop("HTTP_TRANSFER_ENCODING", None)
        length = environ.get("CONTENT_LENGTH")
        if version not in ("1.0", "1.1"):
            raise Refused(505)
        # Servers in front may take another one of the two for the body's length (RFC 9112, section 6.1).
        if method == b"CONNECT" or (coding is not None and (length is not None or version == "1.0")):
            raise Refused(400)
        if coding is not None and coding.lower() != "chunked":
            raise Refused(501)
        if environ.get("HTTP_EXPECT", "100-continue").lower() != "100-continue":
            raise Refused(417)
        self.chunked = coding is not None
        announced = int(length or 0)
        self.limit = settings.ATTACHMENT_MAX_BYTES if path.startswith(UPLOADS) else settings.API_MAX_BODY_BYTES
        self.unread = announced > self.limit
        if self.chunked or (announced and not self.unread):
            # Large bodies go to a file. The default directory is Django's for uploads.
            self.body = tempfile.SpooledTemporaryFile(SPOOL_BYTES)  # noqa: SIM115
            self.address = address_of(environ)

    @property
    def expects_continue(self) -> bool:
        return self.body is not None and "HTTP_EXPECT" in self.environ and self.version == "1.1"

    def take(self, part: bytes) -> bool:
        """Keep a part of the body. False if the limit is exceeded; the rest is not read."""
        self.body.write(part)
        self.size += len(part)
        return self.size <= self.limit

    def finish(self) -> None:
        """Make the environment ready for Django."""
        if self.body is not None:
            self.body.seek(0)
            self.environ["wsgi.input"] = self.body
        if self.chunked:
            self.environ["CONTENT_LENGTH"] = str(self.size)

    def close(self) -> None:
        if self.body is not None:
            self.body.close()


@lru_cache(maxsize=256)
def variable_of(name: bytes) -> str:
    variable = name.decode("latin1").upper().replace("-", "_")
    return variable if variable in ("CONTENT_TYPE", "CONTENT_LENGTH") else f"HTTP_{variable}"


def split_target(target: bytes) -> tuple[bytes, bytes]:
    """Path and query of a request target."""
    if target.startswith(b"/") or target == b"*":
        path, _, query = target.partition(b"?")
        return path, query
    try:
        url = httptools.parse_url(target)
    except httptools.HttpParserInvalidURLError:
        raise Refused(400) from None
    return url.path or b"/", url.query or b""


def environment(local: Any, peer: Any) -> dict[str, Any]:
    """The part of the environment that all requests of a connection share. The addresses are the socket's."""
    name, port = local[:2] if isinstance(local, tuple) else ("localhost", 0)
    client = peer[0] if isinstance(peer, tuple) else ""
    return {
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": "http",  # Django reads the scheme, with TRUST_FORWARDED_PROTO
        "wsgi.errors": sys.stderr,
        "wsgi.input": Nothing(),
        "wsgi.multithread": True,
        "wsgi.multiprocess": True,
        "wsgi.run_once": False,
        "SCRIPT_NAME": "",
        "SERVER_NAME": str(name),
        "SERVER_PORT": str(port),
        "REMOTE_ADDR": client,
    }


class Nothing:
    """The input of a request without a body, or with one that is not read."""

    def read(self, size: int = -1) -> bytes:
        return b""

    readline = read

    def __iter__(self) -> Any:
        return iter(())
