"""Chats, their messages and attachments on both surfaces."""

from typing import Any

from django.http import HttpResponseBase
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse, extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from chats import attachments, services, transfers
from chats.models import Attachment
from chats.serializers import (
    CLIENT_ID_PROBLEM,
    AttachmentInput,
    AttachmentSerializer,
    ChatChanges,
    ChatInput,
    ChatSerializer,
    CreatedAttachmentSerializer,
    MessageSerializer,
)
from config.api.negotiation import AnyMediaType
from config.api.serializers import NoInput
from config.api.viewsets import ServiceViewSet
from config.kernel.errors import NotFound, ValidationFailed
from config.kernel.ids import is_plausible_id
from config.kernel.jsontext import dumps, parse_object

REPLACED = OpenApiParameter(
    "replaced",
    enum=["true", "false"],
    default="false",
    description="`true`: with those that were replaced by a later run, which are left out otherwise.",
)


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

    def queryset_for(self, user: Any) -> Any:
        return services.chats_of(user)

    def list(self, request: Request) -> Response:
        chats, client_id = self.get_queryset(), request.query_params.get("clientId")
        if client_id is None:
            return self.page(chats)
        if not services.CLIENT_ID.fullmatch(client_id):
            raise ValidationFailed({"clientId": [CLIENT_ID_PROBLEM]})
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
        chat = self.get_object()
        return self.show(services.rename_chat(chat, **self.read(ChatChanges)))

    def destroy(self, request: Request, chatId: str) -> Response:
        services.delete_chat(self.get_object())
        return Response(status=204)


class MessageViewSet(ServiceViewSet):
    tag = "chats"
    serializer_class = MessageSerializer
    lookup_url_kwarg = "messageId"
    required_scopes = {"retrieve": "chats:read"}

    def queryset_for(self, user: Any) -> Any:
        return services.messages_of(user)


class ChatMessageViewSet(ServiceViewSet):
    serializer_class = MessageSerializer
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

    def queryset_for(self, user: Any) -> Any:
        return services.chats_of(user)

    def list(self, request: Request, chatId: str) -> Response:
        query = request.query_params
        messages = services.messages_of(request.user).filter(chat=self.get_object())
        if query.get("replaced") != "true":
            messages = messages.filter(replaced=False)
        if (run_id := query.get("runId")) is not None:
            messages = messages.filter(run_id=run_id) if is_plausible_id(run_id) else messages.none()
        return self.page(messages, at_once=25, ascending=query.get("order") != "desc")


class AttachmentViewSet(ServiceViewSet):
    serializer_class = AttachmentSerializer
    lookup_url_kwarg = "attachmentId"
    required_scopes = {"create": "attachments:write", "complete": "attachments:write", "retrieve": "chats:read"}
    # 404 of ``create``: a replay for an attachment whose chat was deleted meanwhile.
    error_statuses = {"create": {404}, "complete": {409}}

    def queryset_for(self, user: Any) -> Any:
        return attachments.attachments_of(user)

    @extend_schema(
        description=(
            "Announces a file. Its bytes are then sent to `upload.url`, with `upload.headers` and without a bearer "
            "token, and the attachment is completed; a message can use it from then on, once."
        ),
        request=AttachmentInput,
        responses={201: CreatedAttachmentSerializer},
    )
    def create(self, request: Request) -> Response:
        attachment = attachments.create_attachment(request.user, **self.read(AttachmentInput))
        return Response(self.announced(attachment), status=201)

    def announced(self, attachment: Attachment) -> dict[str, Any]:
        attachment.upload = attachments.upload_of(attachment, self.surface)  # type: ignore[attr-defined]
        return CreatedAttachmentSerializer(attachment).data

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


class AttachmentContentViewSet(ServiceViewSet):
    lookup_url_kwarg = "attachmentId"
    required_scopes = {"content": "chats:read"}
    content_negotiation_class = AnyMediaType
    error_statuses = {"content": {416, -406}}

    def queryset_for(self, user: Any) -> Any:
        return attachments.attachments_of(user)

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
        return transfers.serve(self.get_object(), request)
