"""Downloads of attachments: the whole file or one range, and never a page in the service's origin."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from urllib.parse import quote

from django.core.files.base import File
from django.http import HttpResponse, HttpResponseBase, StreamingHttpResponse
from rest_framework.request import Request

from chats import files, media
from chats.attachments import transfer
from chats.models import Attachment, AttachmentStatus
from config.kernel.errors import DomainError, NotFound

RANGE = re.compile(r"bytes=[ \t]*(\d{0,18})-(\d{0,18})[ \t]*", re.IGNORECASE | re.ASCII)
# Not allowed in file names on some systems; some clients read them as folders.
UNSAFE = re.compile(r'[/\\:*?"<>|]')


class RangeNotSatisfiable(DomainError):
    status, code, message = 416, "REQUESTED_RANGE_NOT_SATISFIABLE", "The file has no such bytes."

    def __init__(self, size: int) -> None:
        super().__init__(headers={"Content-Range": f"bytes */{size}"})


def serve(attachment: Attachment, request: Request) -> HttpResponseBase:
    """Raises NotFound if there is no file (yet), RangeNotSatisfiable, Unavailable."""
    if attachment.status != AttachmentStatus.READY:
        raise NotFound("The attachment has no file, as it is not complete.")
    size, etag = attachment.size_bytes, f'"{attachment.sha256}"'
    headers = {
        "Accept-Ranges": "bytes",
        "Cache-Control": "private, no-cache",
        "Content-Disposition": content_disposition(attachment.file_name),
        "Content-Security-Policy": "sandbox; default-src 'none'",
        "ETag": etag,
        "X-Content-Type-Options": "nosniff",
    }
    if _names(request.headers.get("If-None-Match"), etag):
        return HttpResponse(status=304, headers={"Cache-Control": headers["Cache-Control"], "ETag": etag})
    wanted = None
    if_range = request.headers.get("If-Range")
    if if_range is None or if_range.strip() == etag:
        wanted = byte_range(request.headers.get("Range", ""), size)
    first, last = wanted or (0, size - 1)
    if wanted is not None:
        headers["Content-Range"] = f"bytes {first}-{last}/{size}"
    headers["Content-Length"] = str(last - first + 1)
    kind = attachment.content_type
    headers["Content-Type"] = f"{kind}; charset=utf-8" if media.is_text(kind) and kind != "application/json" else kind
    status = 200 if wanted is None else 206
    if request.method == "HEAD":
        return HttpResponse(status=status, headers=headers)
    with ExitStack() as until_closed:
        until_closed.enter_context(transfer(attachment.user_id))
        try:
            file = until_closed.enter_context(files.open_file(attachment.stored_name))
        except FileNotFoundError:
            raise NotFound("The attachment's file is gone.") from None
        file.seek(first)
        part = Part(file, last - first + 1, until_closed.pop_all().close)
    return StreamingHttpResponse(part, status=status, headers=headers)


def byte_range(header: str, size: int) -> tuple[int, int] | None:
    """The first and the last byte of the requested range. None for the whole file: without a range, with several or
    with a malformed one (RFC 9110, section 14.2). Raises RangeNotSatisfiable.
    """
    match = RANGE.fullmatch(header)
    if match is None or match.group(1, 2) == ("", ""):
        return None
    if not match[1]:
        length = int(match[2])
        if not length:
            raise RangeNotSatisfiable(size)
        return max(0, size - length), size - 1
    first = int(match[1])
    last = int(match[2]) if match[2] else size - 1
    if match[2] and last < first:
        return None
    if first >= size:
        raise RangeNotSatisfiable(size)
    return first, min(last, size - 1)


def content_disposition(file_name: str) -> str:
    """A download under this name (RFC 6266): in ASCII for old clients, and in UTF-8 (RFC 5987) if that differs.
    Characters that are invisible or not allowed in file names are replaced.
    """
    clean = "".join(
        "_" if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") else character
        for character in UNSAFE.sub("_", file_name)
    )
    if not clean.strip(". "):
        clean = "file"
    # Some clients decode percent signs here, although the standard gives them no meaning.
    plain = clean.encode("ascii", "replace").decode().replace("?", "_").replace("%", "_")
    header = f'attachment; filename="{plain}"'
    return header if plain == clean else f"{header}; filename*=UTF-8''{quote(clean, safe='')}"


def _names(if_none_match: str | None, etag: str) -> bool:
    """Whether the client already has this file."""
    given = [tag.strip().removeprefix("W/") for tag in (if_none_match or "").split(",")]
    return etag in given or given == ["*"]


class Part:
    """The next ``count`` bytes of a file.

    The response calls ``close``, also for a client that left before the first byte; a generator that never started
    would leave the file open.
    """

    def __init__(self, file: File, count: int, close: Callable[[], None]) -> None:
        self.file, self.left = file, count
        self.close = close

    def __iter__(self) -> Iterator[bytes]:
        while self.left and (part := self.file.read(min(files.READ_SIZE, self.left))):
            self.left -= len(part)
            yield part
