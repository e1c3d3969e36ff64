"""The parts of a request: the WSGI environment for Django, and a body that is bounded while it arrives."""

import asyncio
import contextlib
import io
import logging
import resource
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import unquote_to_bytes

from config import settings
from config.api.ratelimit import address_of
from config.limits.share import Room

logger = logging.getLogger(__name__)

Receive = Callable[[], Awaitable[dict[str, Any]]]

HEADER_MAX_BYTES = 16 * 1024  # a session token may have 16 KiB
# The part of a body that is kept in memory while it arrives. The rest is in a temporary file.
SPOOL_BYTES = 16 * 1024
# The most bytes of all bodies that have begun to arrive and are not answered.
BODIES_MAX_BYTES = max(256 * 1024 * 1024, 8 * settings.ATTACHMENT_MAX_BYTES)
# Bodies in files may take this part (an eighth) of the process's limit of open files.
BODY_FILES_SHARE = 8
# The time limit of a body, by how many arrived bytes it grows by a second, and its maximum.
BODY_SECONDS = 15.0
BODY_BYTES_PER_SECOND, BODY_MAX_SECONDS = 1024, 600.0
# The limits of bodies, by the beginning of the path; for all others API_MAX_BODY_BYTES.
LIMITS = {
    "/uploads/": settings.ATTACHMENT_MAX_BYTES,
    "/api/callbacks/": max(settings.API_MAX_BODY_BYTES, settings.TOOL_ANSWER_MAX_BYTES),
    **{f"/api/v1/{name}/": settings.UI_MAX_BODY_BYTES for name in settings.UI_PROTOCOLS},
    **{f"/api/public/v1/{name}/": settings.UI_MAX_BODY_BYTES for name in settings.UI_PROTOCOLS},
}


class Refused(Exception):
    """The request is not passed to Django. The arguments are the answer's status, code and message."""


def body_limit(path: str) -> int:
    return next((limit for start, limit in LIMITS.items() if path.startswith(start)), settings.API_MAX_BODY_BYTES)


def environment(scope: dict[str, Any]) -> dict[str, Any]:
    """The WSGI environment that Django reads. The addresses are those of the socket. Raises Refused."""
    environ = {
        "wsgi.url_scheme": "http",  # Django reads the scheme, with TRUST_FORWARDED_PROTO
        "wsgi.input": io.BytesIO(),
        "SCRIPT_NAME": "",
        "SERVER_PROTOCOL": "HTTP/1.1",
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


@contextlib.asynccontextmanager
async def arrived(environ: dict[str, Any], receive: Receive, room: Room) -> AsyncIterator[bool]:
    """Read the body into ``wsgi.input``, which is open until the block ends. Yields whether a part of the body is left
    unread, because it is larger than any view accepts; if its announced length is, nothing is read. Raises Refused.
    """
    coding = environ.pop("HTTP_TRANSFER_ENCODING", None)
    if coding is not None and coding.lower() != "chunked":
        raise Refused(501, "VALIDATION_ERROR", "The transfer coding is not supported.")
    limit = body_limit(environ["PATH_INFO"])
    if coding is None and not 0 < int(environ.get("CONTENT_LENGTH") or 0) <= limit:
        yield "CONTENT_LENGTH" in environ
        return
    client, size, taken, more = address_of(environ), 0, 0, True
    file = tempfile.SpooledTemporaryFile(SPOOL_BYTES)  # noqa: SIM115
    started = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(None) as time_limit:
            while more and size <= limit:
                time_limit.reschedule(started + min(BODY_SECONDS + size / BODY_BYTES_PER_SECOND, BODY_MAX_SECONDS))
                message = await receive()
                if message["type"] == "http.disconnect":  # or the rest is not valid HTTP
                    raise Refused(400, "VALIDATION_ERROR", "The request's body is incomplete.")
                part, more = message["body"], message["more_body"]
                count = len(part)
                if size <= SPOOL_BYTES < size + len(part):  # a file counts more, so that there are not too many
                    count += BODIES_MAX_BYTES * BODY_FILES_SHARE // resource.getrlimit(resource.RLIMIT_NOFILE)[0]
                if not room.take_now(client, count):
                    raise Refused(503, "UNAVAILABLE", "The server receives too much at the moment; try again.")
                taken += count
                size += len(part)
                file.write(part)
        file.seek(0)
        environ |= {"wsgi.input": file, "CONTENT_LENGTH": str(size)}
        yield more
    except TimeoutError:
        raise Refused(408, "VALIDATION_ERROR", "The request's body did not arrive in time.") from None
    except OSError:
        logger.exception("a body cannot be kept in the directory for temporary files")
        raise Refused(503, "UNAVAILABLE", "The server cannot receive this at the moment; try again.") from None
    finally:
        file.close()
        if taken:
            room.give_back(client, taken)
