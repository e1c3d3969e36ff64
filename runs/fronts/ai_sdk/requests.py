"""What a client of the AI SDK sends. Of its history only the last message counts; the rest is ignored."""

import base64
import binascii
import re
from dataclasses import dataclass
from typing import Any

from django.conf import settings

from chats import attachments
from chats.serializers import AttachmentInput
from chats.services import CLIENT_ID
from config.kernel.errors import ValidationFailed
from config.kernel.jsontext import require_text, to_text
from runs.fronts.starts import text_of
from runs.models import Waitpoint

ROLES = ("user", "assistant")
REGENERATE = "regenerate-message"
FILE_NAME_MAX_CHARS = 255
# RFC 2397.
DATA_URL = re.compile(r"data:([^,;]*)((?:;[^,]*)?),", re.IGNORECASE)
BROKEN_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
OWN_URL = re.compile(r"/api/(?:public/)?v1/attachments/(att_[0-9a-z]+)/content")


# A file of a message: the id of an attachment, or the AttachmentInput and the content of a new one.
File = str | tuple[dict[str, Any], bytes]


@dataclass(frozen=True)
class Sent:
    """A request. ``chat`` and ``message_id`` are the client's ids."""

    chat: str
    role: str
    message_id: str
    parts: list[dict[str, Any]]
    regenerates: str | None
    run: Any

    @property
    def text(self) -> str:
        return text_of(self.parts)

    def files(self) -> list[File]:
        """Raises ValidationFailed for too many files and for an address that is not our own."""
        files = [(index, part) for index, part in enumerate(self.parts) if part.get("type") == "file"]
        most = attachments.ATTACHMENTS_PER_MESSAGE_MAX
        if len(files) > most:
            raise ValidationFailed({"messages.parts": [f"A message may have at most {most} attachments."]})
        return [_file(part, f"messages.parts.{index}.url") for index, part in files]


def read(body: dict[str, Any]) -> Sent:
    """Raises ValidationFailed, MalformedJSON."""
    chat = body.get("id")
    if not isinstance(chat, str) or not CLIENT_ID.fullmatch(chat):
        raise ValidationFailed({"id": ["Use 1 to 128 printable ASCII characters."]})
    messages = body.get("messages")
    if messages is None:
        messages = [body.get("message")]
    last = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(last, dict):
        raise ValidationFailed({"messages": ["Use a list that ends with a message."]})
    role, name, parts = last.get("role"), last.get("id"), last.get("parts")
    if role not in ROLES:
        raise ValidationFailed({"messages.role": [f"Use one of these roles: {', '.join(ROLES)}."]})
    if not isinstance(name, str) or not name:
        raise ValidationFailed({"messages.id": ["A message must have an id."]})
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise ValidationFailed({"messages.parts": ["Use a list of objects."]})
    regenerates = None
    if body.get("trigger") == REGENERATE:
        named = body.get("messageId")
        regenerates = named if isinstance(named, str) and named else name
    sent = Sent(chat, role, name, parts, regenerates, body.get("run", {}))
    require_text(vars(sent))
    return sent


def _file(part: dict[str, Any], field: str) -> File:
    url = part.get("url")
    if not isinstance(url, str):
        raise ValidationFailed({field: ["Use an address."]})
    if own := OWN_URL.fullmatch(url.removeprefix(settings.BASE_URL)):
        return own[1]
    head = DATA_URL.match(url)
    if head is None:
        raise ValidationFailed({field: ["Use a data: address, or that of an attachment of this service."]})
    try:
        content = _content(url[head.end() :], is_base64=head[2].lower().endswith(";base64"))
    except (binascii.Error, ValueError):
        raise ValidationFailed({field: ["The content of this address is not valid."]}) from None
    given = part.get("mediaType")
    media_type = given if isinstance(given, str) and given else head[1]
    name = part.get("filename")
    name = name[:FILE_NAME_MAX_CHARS] if isinstance(name, str) and name else "file"
    return {"fileName": name, "contentType": media_type, "sizeBytes": len(content)}, content


def _content(text: str, *, is_base64: bool) -> bytes:
    """Raises ValueError."""
    if BROKEN_ESCAPE.search(text):
        raise ValueError("an escape without its digits")
    # ``unquote_to_bytes`` makes two objects for each escape. Quoted-printable text has the same escapes with "=".
    content = binascii.a2b_qp(text.encode().replace(b"=", b"=3D").replace(b"%", b"="))
    return base64.b64decode(content, validate=True) if is_base64 else content


def attach(user: Any, files: list[File]) -> list[str]:
    """The ids of the files' attachments. Files with content get one now, which expires if no message uses it.

    Raises ValidationFailed, DRF's ValidationError, PayloadTooLarge, Conflict, Unavailable, RateLimited.
    """
    return [file if isinstance(file, str) else _attach(user, *file) for file in files]


def _attach(user: Any, said: dict[str, Any], content: bytes) -> str:
    made = attachments.create_attachment(user, **AttachmentInput.validated(said))
    with attachments.transfer(made.user_id):
        attachments.receive(made, iter([content]))
    made.refresh_from_db()
    attachments.complete_attachment(made)
    return made.pk


def as_text(output: Any) -> str:
    """A client's answer to a question as text."""
    return output if isinstance(output, str) else to_text(output)


def answer_of(waitpoint: Waitpoint, output: Any, *, failed: bool) -> dict[str, Any]:
    """The fields with which REST answers the question; the client gave the answer as the output of a call."""
    if "schema" not in waitpoint.request_payload:
        return {"answer": as_text(output)}
    return {"declined": True} if failed else {"data": output}
