"""What a request brings: the WSGI environment that Django gets, and a body that is bounded while it arrives."""

from __future__ import annotations

import io
import resource
import sys
import tempfile
from typing import Any
from urllib.parse import unquote_to_bytes

from config import settings
from config.api.ratelimit import address_of
from config.limits.share import Room

HEADER_MAX_BYTES = 16 * 1024  # a session token may have 16 KiB
# The part of a body that is kept in memory while it arrives. The rest is in a temporary file.
SPOOL_BYTES = 16 * 1024
# Of all bodies that have begun to arrive and are not answered.
BODIES_MAX_BYTES = max(256 * 1024 * 1024, 8 * settings.ATTACHMENT_MAX_BYTES)
# Of the process's limit of open files, bodies in files may take an eighth.
BODY_FILES_SHARE = 8
UPLOADS = "/uploads/"


class Refused(Exception):
    """The request is not passed to Django. The arguments are the answer's status, code and message."""


def body_file_bytes() -> int:
    """What a body in a file counts for beside its size, so that the bodies' files are few enough."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return BODIES_MAX_BYTES * BODY_FILES_SHARE // files


class Body:
    """A body that arrives: at most ``limit`` bytes of it. Close it in any case."""

    def __init__(self, room: Room, client: str, limit: int) -> None:
        self.room, self.client, self.limit = room, client, limit
        self.file = tempfile.SpooledTemporaryFile(SPOOL_BYTES)  # noqa: SIM115
        self.size = self.charged = 0

    def add(self, part: bytes) -> bool:
        """False if the limit is exceeded, and the rest need not be read. Raises Refused if there is no room."""
        was_in_memory = self.size <= SPOOL_BYTES
        self.size += len(part)
        count = len(part)
        if was_in_memory and self.size > SPOOL_BYTES:
            count += body_file_bytes()
        if not self.room.take_now(self.client, count):
            raise Refused(503, "UNAVAILABLE", "The server receives too much at the moment; try again.")
        self.charged += count
        self.file.write(part)
        return self.size <= self.limit

    def close(self) -> None:
        self.file.close()
        if self.charged:
            self.room.give_back(self.client, self.charged)


BASE = {
    "wsgi.version": (1, 0),
    "wsgi.url_scheme": "http",  # Django reads the scheme, with TRUST_FORWARDED_PROTO
    "wsgi.errors": sys.stderr,
    "wsgi.multithread": True,
    "wsgi.multiprocess": True,
    "wsgi.run_once": False,
    "SCRIPT_NAME": "",
    "SERVER_PROTOCOL": "HTTP/1.1",
}


def environment(scope: dict[str, Any]) -> dict[str, Any]:
    """The WSGI environment. The addresses are the socket's. Raises Refused."""
    environ = {
        **BASE,
        "wsgi.input": io.BytesIO(),
        "REQUEST_METHOD": scope["method"],
        "PATH_INFO": unquote_to_bytes(scope["raw_path"]).decode("latin1"),
        "QUERY_STRING": scope["query_string"].decode("latin1"),
        "SERVER_NAME": scope["server"][0],
        "SERVER_PORT": str(scope["server"][1]),
        "REMOTE_ADDR": scope["client"][0],
    }
    for name, value in scope["headers"]:
        # ``a_b`` and ``a-b`` would be the same variable, and a proxy in front removes only one of them.
        if b"_" in name:
            continue
        if len(name) + len(value) > HEADER_MAX_BYTES:
            raise Refused(431, "HEADERS_TOO_LARGE", "The request's headers are too large.")
        variable = name.decode("ascii").upper().replace("-", "_")
        if variable not in ("CONTENT_TYPE", "CONTENT_LENGTH"):
            variable = f"HTTP_{variable}"
        text = value.decode("latin1")
        environ[variable] = f"{environ[variable]},{text}" if variable in environ else text
    return environ


def expected_body(environ: dict[str, Any], room: Room) -> Body | None:
    """The body that must be read before Django is called. None if there is none, or if it is larger than any view
    accepts: then Django answers by its announced length. Raises Refused.
    """
    coding = environ.pop("HTTP_TRANSFER_ENCODING", None)
    if coding is not None and coding.lower() != "chunked":
        raise Refused(501, "VALIDATION_ERROR", "The transfer coding is not supported.")
    upload = environ["PATH_INFO"].startswith(UPLOADS)
    limit = settings.ATTACHMENT_MAX_BYTES if upload else settings.API_MAX_BODY_BYTES
    if coding is None and not 0 < int(environ.get("CONTENT_LENGTH") or 0) <= limit:
        return None
    return Body(room, address_of(environ), limit)
