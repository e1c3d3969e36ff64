"""The bytes of attachments: ``PUT {upload.url}``, and downloads of the whole file or one range.

An upload's URL is its credential, so there is no bearer token. If there is an object storage, clients upload to it.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from django.conf import settings
from django.core.files.base import File
from django.http import HttpRequest, HttpResponse, HttpResponseBase, StreamingHttpResponse
from django.utils.cache import get_conditional_response
from django.utils.http import content_disposition_header
from django.views.decorators.csrf import csrf_exempt
from rest_framework.request import Request

from chats import attachments, files, media
from chats.models import Attachment, AttachmentStatus
from config.api import ratelimit
from config.api.errors import answers_errors
from config.kernel.errors import DomainError, MethodNotAllowed, NotFound, PayloadTooLarge, ValidationFailed

RANGE = re.compile(r"bytes=[ \t]*(\d{0,18})-(\d{0,18})[ \t]*", re.IGNORECASE | re.ASCII)
# Characters that some systems do not allow in file names; some clients read them as folders, also after decoding %2F.
UNSAFE = set('/\\:*?"<>|%')


class RangeNotSatisfiable(DomainError):
    status, code, message = 416, "REQUESTED_RANGE_NOT_SATISFIABLE", "The file has no such bytes."

    def __init__(self, size: int) -> None:
        super().__init__(headers={"Content-Range": f"bytes */{size}"})


@csrf_exempt
def receive_upload(request: HttpRequest, token: str) -> HttpResponseBase:
    """204 after the file is stored. A client may repeat the upload until the attachment is complete."""
    response = _receive(request, token)
    verdict = ratelimit.verdict_of(request)
    for name, value in (verdict.headers() if verdict else {}).items():
        response[name] = value
    return response


@answers_errors("an upload failed")
def _receive(request: HttpRequest, token: str) -> HttpResponse:
    if request.method != "PUT":
        raise MethodNotAllowed(headers={"Allow": "PUT"})
    try:
        surface, attachment = attachments.attachment_to_upload(token)
    except NotFound:
        ratelimit.refuse_if_over(ratelimit.charge_address(request))
        raise
    ratelimit.charge_caller(request, ratelimit.requests_of(surface, attachment.user))
    attachments.refuse_unless_pending(attachment)
    # ``config.serve`` has read the whole body, so its length is correct.
    size, announced = int(request.META.get("CONTENT_LENGTH") or 0), attachment.size_bytes
    if size != announced:
        if size > settings.ATTACHMENT_MAX_BYTES:
            raise PayloadTooLarge(f"A file may have at most {settings.ATTACHMENT_MAX_BYTES} bytes.")
        raise ValidationFailed({"sizeBytes": [f"The body has {size} bytes, not the {announced} that were announced."]})
    with attachments.transfer(attachment.user_id):
        attachments.receive(attachment, iter(lambda: request.read(files.READ_SIZE), b""))
    return HttpResponse(status=204)


def serve(attachment: Attachment, request: Request) -> HttpResponseBase:
    """The file, always as a download. Raises NotFound without a file, RangeNotSatisfiable, Unavailable."""
    if attachment.status != AttachmentStatus.READY:
        raise NotFound("The attachment has no file, as it is not complete.")
    size, etag, kind = attachment.size_bytes, f'"{attachment.sha256}"', attachment.content_type
    headers = {
        "Accept-Ranges": "bytes",
        "Cache-Control": "private, no-cache",
        "Content-Disposition": content_disposition(attachment.file_name),
        "Content-Security-Policy": "sandbox; default-src 'none'",
        "Content-Type": f"{kind}; charset=utf-8" if media.is_text(kind) and kind != "application/json" else kind,
        "ETag": etag,
        "X-Content-Type-Options": "nosniff",
    }
    whole = HttpResponse(headers=headers)
    answer: Any = get_conditional_response(request, etag=etag, response=whole)
    if answer is not whole:  # the client has the file already
        return answer
    is_same = request.headers.get("If-Range", etag).strip() == etag
    wanted = byte_range(request.headers.get("Range", ""), size) if is_same else None
    first, last = wanted or (0, size - 1)
    headers["Content-Length"] = str(last - first + 1)
    if wanted is not None:
        headers["Content-Range"] = f"bytes {first}-{last}/{size}"
    status = 200 if wanted is None else 206
    if request.method == "HEAD":
        return HttpResponse(status=status, headers=headers)
    with ExitStack() as until_closed:
        until_closed.enter_context(attachments.transfer(attachment.user_id))
        try:
            file = until_closed.enter_context(files.open_file(attachment.stored_name))
        except FileNotFoundError:
            raise NotFound("The attachment's file is gone.") from None
        file.seek(first)
        part = Part(file, last - first + 1, until_closed.pop_all().close)
    return StreamingHttpResponse(part, status=status, headers=headers)


def byte_range(header: str, size: int) -> tuple[int, int] | None:
    """The first and the last byte of the requested range. None for the whole file: there is no range, or there are
    several, or it is malformed (RFC 9110, section 14.2). Raises RangeNotSatisfiable.
    """
    match = RANGE.fullmatch(header)
    if match is None or match.group(1, 2) == ("", ""):
        return None
    if match[1]:
        first, last = int(match[1]), int(match[2] or size - 1)
        if match[2] and last < first:
            return None
    else:  # the last bytes
        first, last = max(0, size - int(match[2])), size - 1
    if first >= size:
        raise RangeNotSatisfiable(size)
    return first, min(last, size - 1)


def content_disposition(file_name: str) -> str:
    """The header of a download with this name, without characters that are invisible or not allowed in file names."""
    clean = "".join("_" if sign in UNSAFE or not sign.isprintable() else sign for sign in file_name)
    return content_disposition_header(True, clean if clean.strip(". ") else "file") or ""


class Part:
    """The next ``count`` bytes of a file.

    The response calls ``close``, also if the client left before the first byte. A generator that never started would
    leave the file open.
    """

    def __init__(self, file: File, count: int, close: Callable[[], None]) -> None:
        self.file, self.left = file, count
        self.close = close

    def __iter__(self) -> Iterator[bytes]:
        while self.left and (part := self.file.read(min(files.READ_SIZE, self.left))):
            self.left -= len(part)
            yield part
