"""``PUT {upload.url}``: the raw bytes of an attachment, on their way to the storage a part at a time.

The address is the credential, so there is no bearer token. Where the storage takes uploads itself, none comes here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.views.decorators.csrf import csrf_exempt

from chats import attachments
from chats.files import READ_SIZE
from config.api import ratelimit
from config.api.errors import envelope, error_response, to_domain_error
from config.kernel.errors import DomainError, NotFound, PayloadTooLarge, ValidationFailed
from config.kernel.jsontext import dumps

logger = logging.getLogger(__name__)


@csrf_exempt
def receive_upload(request: HttpRequest, token: str) -> HttpResponse:
    """204 once the file is stored. It can be sent again until the attachment is complete."""
    if request.method != "PUT":
        response = error_response(405)
        response["Allow"] = "PUT"
        return response
    try:
        _receive(request, token)
        response = HttpResponse(status=204)
    except Exception as error:
        refusal = to_domain_error(error)
        if refusal.status >= 500:
            logger.error("an upload failed", exc_info=error)
        body = dumps(envelope(refusal.code, refusal.message, refusal.details))
        response = HttpResponse(body, status=refusal.status, content_type="application/json")
        for name, value in refusal.headers.items():
            response[name] = value
    verdict = ratelimit.verdict_of(request)
    for name, value in (verdict.headers() if verdict else {}).items():
        response[name] = value
    return response


def _receive(request: HttpRequest, token: str) -> None:
    try:
        surface, attachment = attachments.attachment_to_upload(token)
    except NotFound:
        ratelimit.refuse_if_over(ratelimit.charge_address(request))
        raise
    ratelimit.charge_user(request, surface, attachment.user)
    attachments.refuse_unless_pending(attachment)
    attachments.receive(attachment, body_parts(request, attachment.size_bytes))


def body_parts(request: HttpRequest, size: int) -> Iterator[bytes]:
    """The body, which must have exactly ``size`` bytes; refused as early as it can be seen that it has not.

    Content-Length is believed only where it says no: at most ``size`` bytes and one are read. A chunked body has none.
    """
    chunked = "chunked" in request.META.get("HTTP_TRANSFER_ENCODING", "").lower()
    stream: Any = request
    # The server says so if its stream ends by itself; reading one that does not would wait for ever.
    if chunked and request.META.get("wsgi.input_terminated"):
        stream = request.META["wsgi.input"]
    else:
        try:
            announced = int(request.META.get("CONTENT_LENGTH") or 0)
        except ValueError:
            raise DomainError("Content-Length is not a number.") from None
        if announced != size:
            raise _wrong_size(announced, size)
    read = 0
    while True:
        try:
            part = stream.read(min(READ_SIZE, size + 1 - read))
        except Exception as error:  # a client that went away, or a server's own exception for a malformed chunk
            raise DomainError("The request body could not be read.") from error
        if not part:
            break
        read += len(part)
        if read > size:
            raise _wrong_size(read, size)
        yield part
    if read != size:
        raise _wrong_size(read, size)


def _wrong_size(found: int, size: int) -> DomainError:
    if found > settings.ATTACHMENT_MAX_BYTES:
        return PayloadTooLarge(f"A file may have at most {settings.ATTACHMENT_MAX_BYTES} bytes.")
    more = "more" if found > size else f"{found}"
    return ValidationFailed({"sizeBytes": [f"The body has {more} bytes, not the {size} that were announced."]})
