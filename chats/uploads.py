"""``PUT {upload.url}``: receives the raw bytes of an attachment and passes them to the storage part by part.

The URL is the credential, so there is no bearer token. With an object storage clients upload there, not here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.views.decorators.csrf import csrf_exempt

from chats import attachments
from chats.files import READ_SIZE
from config.api import ratelimit
from config.api.errors import response_to, to_domain_error
from config.kernel.errors import MethodNotAllowed, NotFound, PayloadTooLarge, ValidationFailed

logger = logging.getLogger(__name__)


@csrf_exempt
def receive_upload(request: HttpRequest, token: str) -> HttpResponse:
    """204 after the file is stored. A client may repeat the upload until the attachment is complete."""
    try:
        if request.method != "PUT":
            return response_to(MethodNotAllowed(headers={"Allow": "PUT"}))
        _receive(request, token)
        response = HttpResponse(status=204)
    except Exception as error:
        refusal = to_domain_error(error)
        if refusal.status >= 500:
            logger.error("an upload failed", exc_info=error)
        response = response_to(refusal)
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
    with attachments.transfer(attachment.user_id):
        attachments.receive(attachment, body_parts(request, attachment.size_bytes))


def body_parts(request: HttpRequest, size: int) -> Iterator[bytes]:
    """The body, which must have exactly ``size`` bytes. ``config.serve`` has read it, so its length is true."""
    announced = int(request.META.get("CONTENT_LENGTH") or 0)
    if announced != size:
        if announced > settings.ATTACHMENT_MAX_BYTES:
            raise PayloadTooLarge(f"A file may have at most {settings.ATTACHMENT_MAX_BYTES} bytes.")
        raise ValidationFailed({"sizeBytes": [f"The body has {announced} bytes, not the {size} that were announced."]})
    while part := request.read(READ_SIZE):
        yield part
