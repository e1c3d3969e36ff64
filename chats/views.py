"""Chats, their messages and attachments on both surfaces, and the bytes of attachments. ``PUT {upload.url}`` needs no
bearer token: the URL is the credential. If there is an object storage, clients upload to that instead.
"""

import re
from collections.abc import Iterator
from typing import Any

from django.conf import settings
from django.core.files.storage import default_storage
from django.http import HttpRequest, HttpResponse, HttpResponseBase, StreamingHttpResponse
from django.utils.cache import get_conditional_response
from django.utils.http import content_disposition_header
from django.views.decorators.csrf import csrf_exempt
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse, extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from chats import attachments, files, serializers, services
from chats.models import Attachment, AttachmentStatus
from chats.serializers import AttachmentInput, ChatChanges, ChatInput, ChatSerializer
from config.api import ratelimit
from config.api.serializers import NoInput
from config.api.viewsets import ServiceViewSet
from config.kernel.errors import DomainError, MethodNotAllowed, NotFound, PayloadTooLarge, ValidationFailed
from config.kernel.ids import is_plausible_id
from config.kernel.jsontext import dumps, parse_object

REPLACED = OpenApiParameter(
    "replaced",
    enum=["true", "false"],
    default="false",
    description="`true`: with those that were replaced by a later run, which are left out otherwise.",
)

RANGE = re.compile(r"bytes=[ \t]*(\d{0,18})-(\d{0,18})[ \t]*", re.IGNORECASE | re.ASCII)
# Characters that some systems do not allow in file names; some clients read them as folders, also after decoding %2F.
UNSAFE = set('/\\:*?"<>|%')


class ChatViewSet(ServiceViewSet):
    serializer_class = ChatSerializer
    lookup_url_kwarg = "chatId"
    required_scopes = {
        "list": "chats:read",
        "retrieve": "chats:read",
        "create": "chats:write",
        "partial_update": "chats:write",
        "destroy": "chats:write",
    }

    query_parameters = {
        "list": [
            OpenApiParameter(
                "clientId",
                {"type": "string", "pattern": f"^{services.CLIENT_ID.pattern}$"},
                description="Only the chat with this client id.",
            )
        ]
    }

    queryset_for = staticmethod(services.chats_of)

    def list(self, request: Request) -> Response:
        chats, client_id = self.get_queryset(), request.query_params.get("clientId")
        if client_id is None:
            return self.page(chats)
        if not services.CLIENT_ID.fullmatch(client_id):
            raise ValidationFailed({"clientId": [serializers.CLIENT_ID_PROBLEM]})
        return self.page(chats.filter(client_id=client_id))

    @extend_schema(request=ChatInput, responses={201: ChatSerializer, 200: ChatSerializer})
    def create(self, request: Request) -> Response:
        chat, created = services.make_chat(request.user, **self.read(ChatInput))
        if not created and not self.has_scope("chats:read"):
            chat.title = None  # the title may be the first line of a message
        return self.show(chat, 201 if created else 200)

    def replayed_answer(self, stored: bytes) -> bytes:
        answer, sent = parse_object(stored), self.read(ChatInput)
        known = self.has_scope("chats:read") or answer["title"] == sent.get("title")
        return stored if known else dumps(answer | {"title": None})

    @extend_schema(request=ChatChanges)
    def partial_update(self, request: Request, chatId: str) -> Response:
        return self.show(services.rename_chat(self.get_object(), **self.read(ChatChanges)))

    def destroy(self, request: Request, chatId: str) -> Response:
        services.delete_chat(self.get_object())
        return Response(status=204)


class MessageViewSet(ServiceViewSet):
    tag = "chats"
    serializer_class = serializers.MessageSerializer
    lookup_url_kwarg = "messageId"
    required_scopes = {"retrieve": "chats:read"}

    queryset_for = staticmethod(services.messages_of)


class ChatMessageViewSet(ServiceViewSet):
    serializer_class = serializers.MessageSerializer
    lookup_url_kwarg = "chatId"
    required_scopes = {"list": "chats:read"}
    query_parameters = {
        "list": [
            REPLACED,
            OpenApiParameter(
                "order", enum=["asc", "desc"], default="asc", description="`desc`: the newest message first."
            ),
            OpenApiParameter("runId", description="Only the messages of this run."),
        ]
    }

    queryset_for = staticmethod(services.chats_of)

    def list(self, request: Request, chatId: str) -> Response:
        query = request.query_params
        messages = services.messages_of(request.user).filter(chat=self.get_object())
        if query.get("replaced") != "true":
            messages = messages.filter(replaced=False)
        if (run_id := query.get("runId")) is not None:
            messages = messages.filter(run_id=run_id) if is_plausible_id(run_id) else messages.none()
        return self.page(messages, at_once=25, ascending=query.get("order") != "desc")


class AttachmentViewSet(ServiceViewSet):
    serializer_class = serializers.AttachmentSerializer
    lookup_url_kwarg = "attachmentId"
    required_scopes = {
        "create": "attachments:write",
        "complete": "attachments:write",
        "retrieve": "chats:read",
        "content": "chats:read",
    }
    # 404 of ``create``: a replay for an attachment whose chat was deleted meanwhile.
    error_statuses = {"create": {404}, "complete": {409}, "content": {416, -406}}

    queryset_for = staticmethod(attachments.attachments_of)

    @extend_schema(request=AttachmentInput, responses={201: serializers.CreatedAttachmentSerializer})
    def create(self, request: Request) -> Response:
        attachment = attachments.create_attachment(request.user, **self.read(AttachmentInput))
        return Response(self.announced(attachment), status=201)

    def announced(self, attachment: Attachment) -> dict[str, Any]:
        attachment.upload = attachments.upload_of(attachment, self.surface)  # type: ignore[attr-defined]
        return serializers.CreatedAttachmentSerializer(attachment).data

    def stored_answer(self, response: Any) -> bytes:
        """Without the upload address, because anyone who reads it in the database or a backup could upload a file."""
        return dumps(response.data | {"upload": {"expiresAt": response.data["upload"]["expiresAt"]}})

    def replayed_answer(self, stored: bytes) -> bytes:
        answer = parse_object(stored)
        attachment = self.get_queryset().filter(pk=answer["id"]).first()
        if attachment is None:
            raise NotFound
        # The stored answer has the upload's time: a complete attachment has none any more.
        return dumps(answer | {"upload": self.announced(attachment)["upload"] | answer["upload"]})

    @extend_schema(request=None)
    def complete(self, request: Request, attachmentId: str) -> Response:
        """Checks the uploaded file's size, digest and type, and makes the attachment ready. Idempotent."""
        attachment = self.get_object()
        self.read(NoInput)
        return self.show(attachments.complete_attachment(attachment))

    @extend_schema(
        parameters=[
            OpenApiParameter("Range", str, OpenApiParameter.HEADER, description="As `bytes=0-1023`."),
            OpenApiParameter("If-Range", str, OpenApiParameter.HEADER, description="An ETag."),
            OpenApiParameter("If-None-Match", str, OpenApiParameter.HEADER, description="An ETag."),
        ],
        responses={
            (200, "application/octet-stream"): OpenApiResponse(OpenApiTypes.BINARY, description="The whole file."),
            (206, "application/octet-stream"): OpenApiResponse(OpenApiTypes.BINARY, description="The range."),
            304: OpenApiResponse(description="The client has this file already."),
        },
    )
    def content(self, request: Request, attachmentId: str) -> HttpResponseBase:
        """The file, as a download with its own content type; a single byte range of it if one is asked for."""
        attachment = self.get_object()
        if attachment.status != AttachmentStatus.READY:
            raise NotFound("The attachment has no file, as it is not complete.")
        size, etag, kind = attachment.size_bytes, f'"{attachment.sha256}"', attachment.content_type
        headers = {
            "Accept-Ranges": "bytes",
            "Cache-Control": "private, no-cache",
            "Content-Disposition": content_disposition(attachment.file_name),
            "Content-Security-Policy": "sandbox; default-src 'none'",
            "Content-Type": f"{kind}; charset=utf-8" if kind.startswith("text/") else kind,
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
        parts = parts_of(attachment, first, last - first + 1)
        next(parts)
        return StreamingHttpResponse(parts, status=status, headers=headers)


class RangeNotSatisfiable(DomainError):
    status, code, message = 416, "REQUESTED_RANGE_NOT_SATISFIABLE", "The file has no such bytes."


@csrf_exempt
def receive_upload(request: HttpRequest, token: str) -> HttpResponse:
    """204 after the file is stored. A client may repeat the upload until the attachment is complete."""
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
        attachments.receive(attachment, request)
    return HttpResponse(status=204)


def byte_range(header: str, size: int) -> tuple[int, int] | None:
    """The first and the last byte of the requested range. None means the whole file: no range is asked for, several
    are, or the header is malformed (RFC 9110, section 14.2). Raises RangeNotSatisfiable.
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
        raise RangeNotSatisfiable(headers={"Content-Range": f"bytes */{size}"})
    return first, min(last, size - 1)


def content_disposition(file_name: str) -> str:
    """The header of a download with this name, without characters that are invisible or not allowed in file names."""
    clean = "".join("_" if sign in UNSAFE or not sign.isprintable() else sign for sign in file_name)
    return content_disposition_header(True, clean if clean.strip(". ") else "file") or ""


def parts_of(attachment: Attachment, first: int, left: int) -> Iterator[bytes]:
    """An empty part, then ``left`` bytes of the file. The caller takes the empty part before it answers: the file is
    then open, and an error can still become the answer. Raises RateLimited, NotFound and Unavailable.
    """
    with attachments.transfer(attachment.user_id):
        try:
            with files.storage_errors():
                file = default_storage.open(attachment.stored_name)
        except FileNotFoundError:
            raise NotFound("The attachment's file is gone.") from None
        with file:
            with files.storage_errors():
                file.seek(first)  # an object storage sends the file now
            yield b""
            while left and (part := file.read(min(files.READ_SIZE, left))):
                left -= len(part)
                yield part
