"""The routes for ``useChat``, on both surfaces. Of the history that a client sends, only the last message counts."""

import base64
import binascii
import re
from io import BytesIO
from typing import Any

from django.conf import settings
from django.http import HttpResponseBase
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse, extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from chats import attachments
from chats.models import Message
from chats.serializers import AttachmentInput
from chats.services import CLIENT_ID, find_chat, messages_of
from config.api.pagination import API_PAGE_SIZE_MAX, CURSOR_SCHEMA, LIMIT_SCHEMA, page
from config.api.serializers import NoInput
from config.api.viewsets import find
from config.kernel.errors import NotFound, ValidationFailed
from config.kernel.jsontext import require_text, to_text
from runs import services
from runs.fronts import reads, starts
from runs.fronts.ai_sdk.chunks import Chunks, ui_message
from runs.fronts.reads import Recorded, recorded_of
from runs.fronts.rendering import CLIENT
from runs.fronts.views import BEGINNING, POSITION, Frames, FrontViewSet, Position, position_of
from runs.models import Run, Waitpoint, WaitpointKind
from runs.streams.views import CONTENT_TYPE, opening_of

FILE_NAME_MAX_CHARS = 255
DATA_URL = re.compile(r"data:([^,;]*)((?:;[^,]*)?),", re.IGNORECASE)  # RFC 2397
BROKEN_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
OWN_URL = re.compile(r"/api/(?:public/)?v1/attachments/(att_[0-9a-z]+)/content")
CHUNKS = OpenApiResponse(OpenApiTypes.STR, description="The chunks.")
LAST_EVENT_ID = OpenApiParameter(
    "Last-Event-ID", POSITION, OpenApiParameter.HEADER, description="The same; it counts before `after`."
)
CHAT_KEY = OpenApiParameter(
    "chatKey", str, OpenApiParameter.PATH, description="The chat's id, or the client's own name of it."
)

# A file of a message: the id of an attachment, or the AttachmentInput and the content of a new one.
File = str | tuple[dict[str, Any], bytes]


class Sent:
    """A request. ``chat`` and ``message_id`` are the client's ids."""

    def __init__(self, body: Any) -> None:
        """Raises ValidationFailed, MalformedJSON."""
        self.chat, messages = body.get("id"), body.get("messages")
        if not isinstance(self.chat, str) or not CLIENT_ID.fullmatch(self.chat):
            raise ValidationFailed({"id": ["Use 1 to 128 printable ASCII characters."]})
        if messages is None:
            messages = [body.get("message")]
        last: Any = messages[-1] if isinstance(messages, list) and messages else None
        if not isinstance(last, dict):
            raise ValidationFailed({"messages": ["Use a list that ends with a message."]})
        self.role, self.message_id, self.parts = last.get("role"), last.get("id", ""), last.get("parts", ())
        if self.role not in ("user", "assistant"):
            raise ValidationFailed({"messages.role": ["Use one of these roles: user, assistant."]})
        if not isinstance(self.message_id, str) or not self.message_id:
            raise ValidationFailed({"messages.id": ["A message must have an id."]})
        if not isinstance(self.parts, list) or not all(isinstance(part, dict) for part in self.parts):
            raise ValidationFailed({"messages.parts": ["Use a list of objects."]})
        self.regenerates: str | None = None
        if body.get("trigger") == "regenerate-message":
            named = body.get("messageId")
            self.regenerates = named if isinstance(named, str) and named else self.message_id
        self.run = body.get("run", {})
        require_text(vars(self))
        self.text = starts.text_of(self.parts)

    def files(self) -> list[File]:
        """Raises ValidationFailed for too many files and for an address that is not our own."""
        files = [(index, part) for index, part in enumerate(self.parts) if part.get("type") == "file"]
        most = attachments.ATTACHMENTS_PER_MESSAGE_MAX
        if len(files) > most:
            raise ValidationFailed({"messages.parts": [f"A message may have at most {most} attachments."]})
        return [_file(part, f"messages.parts.{index}.url") for index, part in files]


def _file(part: dict[str, Any], field: str) -> File:
    url = part.get("url")
    if not isinstance(url, str):
        raise ValidationFailed({field: ["Use an address."]})
    if own := OWN_URL.fullmatch(url.removeprefix(settings.BASE_URL)):
        return own[1]
    head = DATA_URL.match(url)
    if head is None:
        raise ValidationFailed({field: ["Use a data: address, or that of an attachment of this service."]})
    text = url[head.end() :]
    try:
        if BROKEN_ESCAPE.search(text):
            raise ValueError("an escape without its digits")
        # ``unquote_to_bytes`` makes two objects for each escape. Quoted-printable text has the same escapes with "=".
        content = binascii.a2b_qp(text.encode().replace(b"=", b"=3D").replace(b"%", b"="))
        if head[2].lower().endswith(";base64"):
            content = base64.b64decode(content, validate=True)
    except ValueError:
        raise ValidationFailed({field: ["The content of this address is not valid."]}) from None
    given = part.get("mediaType")
    media_type = given if isinstance(given, str) and given else head[1]
    name = part.get("filename")
    name = name[:FILE_NAME_MAX_CHARS] if isinstance(name, str) and name else "file"
    return {"fileName": name, "contentType": media_type, "sizeBytes": len(content)}, content


def attached(user: Any, said: dict[str, Any], content: bytes) -> str:
    """The id of a new attachment, which expires if no message uses it. Raises DomainError, DRF's ValidationError."""
    made = attachments.create_attachment(user, **AttachmentInput.validated(said))
    with attachments.transfer(made.user_id):
        attachments.receive(made, BytesIO(content))
    made.refresh_from_db()
    attachments.complete_attachment(made)
    return made.pk


def as_text(output: Any) -> str:
    """A client's answer to a question as text."""
    return output if isinstance(output, str) else to_text(output)


class AiSdkViewSet(FrontViewSet):
    lookup_url_kwarg = "chatKey"
    # ``create`` checks further scopes, which depend on what it does.
    required_scopes = {"create": "runs:read", "stream": "runs:read", "messages": "chats:read", "stop": "runs:write"}
    error_statuses = {"create": {402, 404, 409, -406}, "stream": {-404, -406}, "messages": {-404, -406}, "stop": {-406}}
    query_parameters = {
        "stream": [OpenApiParameter("after", POSITION, description="Only frames after this one: an `id`.")],
        "messages": [
            OpenApiParameter("limit", LIMIT_SCHEMA | {"default": API_PAGE_SIZE_MAX}, description="The most messages."),
            OpenApiParameter("cursor", CURSOR_SCHEMA, description="The `nextCursor` of the page before."),
        ],
    }
    stream_headers = {"x-vercel-ai-ui-message-stream": "v1"}

    def shown(self, run: Run, after: Position = BEGINNING, *, continues: bool = False) -> Frames:
        return Frames(Chunks(run), opening_of(self.request, run), after, continues=continues)

    @extend_schema(request=None, responses={(200, CONTENT_TYPE): CHUNKS})
    def create(self, request: Request) -> HttpResponseBase:
        sent = Sent(self.body())
        if sent.regenerates is not None:
            return self.open_stream(lambda: self.shown(self.regenerated(sent)))
        if sent.role == "user":
            return self.open_stream(lambda: self.shown(self.asked(sent)))
        return self.open_stream(lambda: self.answered(sent))

    # --- a new run ----------------------------------------------------------------------------------------------------

    def asked(self, sent: Sent) -> Run:
        """The run that answers the message. Sent again, it starts nothing; with another text, it replaces its run."""
        files = sent.files()
        options = starts.options_of(self.request.user, sent.run, message=sent.text)
        self.require_scope("runs:write")
        chat = self.chat(sent.chat, make=True)
        known = starts.named(chat, sent.message_id)
        if known is not None and starts.is_same(known, sent.text):
            return known
        if files:
            if not all(isinstance(file, str) for file in files):
                self.require_scope("attachments:write")
            options["attachment_ids"] = [
                file if isinstance(file, str) else attached(self.request.user, *file) for file in files
            ]
        return self.start(chat, starts.key_of(sent.message_id), options, given=sent.run, message_id=sent.message_id)

    def regenerated(self, sent: Sent) -> Run:
        """The run that replaces the run of the named message. A message without a run gets its first one. By default a
        client names the user's message: a second request then starts another run, unless that of the first request is
        at work. If the client names the answer to replace, the second request starts nothing.
        """
        self.require_scope("runs:write")
        chat = find_chat(self.request.user, sent.chat)
        names = (str(sent.regenerates), sent.message_id)
        before = next(filter(None, (starts.named(chat, name) for name in names)), None) if chat else None
        if chat is None or before is None:
            if sent.role == "user" and sent.regenerates == sent.message_id:
                return self.asked(sent)
            raise NotFound
        options = starts.options_of(self.request.user, sent.run, replaces=before.pk)
        if sent.regenerates != before.assistant_message_id:
            row = starts.find(chat, starts.key_of("regenerate", before.pk))
            before = row.run if row else before
            works = not before.is_over and "on_active_run" not in options
            if works and not starts.waits_for_caller(chat) and Run.objects.filter(replaced_by=before).exists():
                return before
        key = starts.key_of("regenerate", before.pk)
        return self.start(chat, key, options | {"replaces": before.pk}, given=sent.run)

    # --- answers ------------------------------------------------------------------------------------------------------

    def answered(self, sent: Sent) -> Frames:
        """Give the answers of the assistant's message. Returns the frames that follow them."""
        rows = messages_of(self.request.user).filter(chat=self.chat(sent.chat), role=Message.Role.ASSISTANT)
        message = find(rows, sent.message_id)
        found = recorded_of(self.request.user, [message])[message.run_id]
        answers = set[str]()
        for part in sent.parts:
            self.answer(found, part, answers)
        if not answers:
            raise ValidationFailed({"messages": ["The last message answers nothing of this run."]})
        run = Run.objects.get(pk=found.run.pk)
        calls = {name for part in sent.parts if isinstance(name := part.get("toolCallId"), str)}
        return self.shown(run, (reads.index_of_stop(run.pk, answers, calls), 0), continues=True)

    def answer(self, recorded: Recorded, part: dict[str, Any], answers: set[str]) -> None:
        """Give the part's answer, and add the id of what it answers, now or in an earlier request, to ``answers``. A
        body can answer the same thousands of times; the first answer counts.
        """
        state, given, key = part.get("state"), part.get("approval"), part.get("toolCallId")
        asked: Any = None
        if state == "approval-responded" and isinstance(given, dict):
            asked = recorded.asked(WaitpointKind.CREDIT_APPROVAL, given.get("id"))
            answer = {"approved": given.get("approved")} | ({"reason": given["reason"]} if given.get("reason") else {})
        elif (failed := state == "output-error") or state == "output-available":
            output = as_text(part.get("errorText"))[: starts.ERROR_MAX_CHARS] if failed else part.get("output")
            asked = recorded.asked(WaitpointKind.CLARIFICATION, key)
            if asked is not None and "schema" in asked.request_payload:
                answer = {"declined": True} if failed else {"data": output}
            elif asked is not None:
                answer = {"answer": as_text(output)}
            else:
                asked = next((each for each in recorded.calls if each.node_type == CLIENT and each.pk == key), None)
                answer = {"error": output or "It failed."} if failed else {"result": output}
        if asked is not None and asked.pk not in answers:
            answers.add(asked.pk)
            give = self.respond if isinstance(asked, Waitpoint) else self.submit
            give(asked, answer)

    # --- the chat -----------------------------------------------------------------------------------------------------

    @extend_schema(
        parameters=[CHAT_KEY, LAST_EVENT_ID],
        responses={(200, CONTENT_TYPE): CHUNKS, 204: OpenApiResponse(description="The chat has no active run.")},
    )
    def stream(self, request: Request, chatKey: str) -> HttpResponseBase:
        after = position_of(request)
        chat = find_chat(request.user, chatKey)
        run = self.active_run(chat) if chat else None
        if run is None:
            return Response(status=204)
        return self.open_stream(lambda: self.shown(run, after))

    @extend_schema(parameters=[CHAT_KEY], responses={200: None})
    def messages(self, request: Request, chatKey: str) -> Response:
        chat = find_chat(request.user, chatKey)
        rows = messages_of(request.user).filter(chat=chat, replaced=False) if chat else Message.objects.none()
        recorded: dict[str, Recorded] = {}

        def prepare(batch: list[Message]) -> None:
            recorded.clear()
            if self.has_scope("runs:read"):
                recorded.update(recorded_of(request.user, batch))

        # A run with many calls is large.
        how: Any = {"limit": API_PAGE_SIZE_MAX, "ascending": True, "at_once": 25, "prepare": prepare}
        base = request.path.partition("/ai-sdk/")[0]
        found = page(rows, request.query_params, lambda message: ui_message(message, recorded, base), **how)
        return Response({"messages": found["items"], "nextCursor": found["nextCursor"]})

    @extend_schema(parameters=[CHAT_KEY], request=None, responses={200: None})
    def stop(self, request: Request, chatKey: str) -> Response:
        NoInput.validated(self.body())
        if (active := self.active_run(self.chat(chatKey))) is not None:
            services.cancel_run(active)
        return Response({"success": True})
