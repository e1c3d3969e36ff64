"""Chats, messages and attachments as clients see them (shapes: docs/resources.md and docs/attachments.md)."""

import re
from typing import Any

from django.conf import settings
from django.core.validators import RegexValidator
from rest_framework.serializers import CharField, ChoiceField, DictField, IntegerField, ValidationError

from chats.models import CLIENT_ID_MAX_CHARS, AttachmentStatus, Message
from chats.services import CLIENT_ID
from config.api.serializers import CamelSerializer, NullableText, StrictCharField, StrictIntegerField, TimestampField

CLIENT_ID_PROBLEM = f"Use 1 to {CLIENT_ID_MAX_CHARS} printable ASCII characters."
_NAME = r"[a-z0-9][a-z0-9!#$&^_.+-]{0,62}"
# Text must be UTF-8, so the parameter need not be stored.
_CHARSET = r"""[ \t]*;[ \t]*charset[ \t]*=[ \t]*"?utf-?8"?[ \t]*"""
# Without re.ASCII, "ſ" and "ı" would count as letters, which no header can contain.
MEDIA_TYPE = re.compile(rf"({_NAME}/{_NAME})(?:{_CHARSET})?", re.IGNORECASE | re.ASCII)


class ChatSerializer(CamelSerializer):
    id = CharField()
    title = NullableText("Null until the first message; then its first line, unless the chat was given a title.")
    client_id = NullableText("The caller's own name of the chat, or null.")
    active_run_id = NullableText("The run that is queued, running or waiting now, or null.")
    created_at = TimestampField()
    updated_at = TimestampField()


class ChatInput(CamelSerializer):
    title = StrictCharField(
        min_length=1,
        max_length=200,
        required=False,
        allow_null=True,
        help_text="1 to 200 characters. Without a title, the chat is named after its first message.",
    )
    client_id = StrictCharField(
        required=False,
        allow_null=True,
        trim_whitespace=False,
        validators=[RegexValidator(rf"\A{CLIENT_ID.pattern}\Z", CLIENT_ID_PROBLEM)],
        help_text="The caller's own name of the chat, 1 to 128 printable ASCII characters. If the caller has a chat "
        "with this name, it is the answer, unchanged.",
    )


class ChatChanges(CamelSerializer):
    title = StrictCharField(min_length=1, max_length=200, allow_null=True, help_text="1 to 200 characters, or null.")


class AttachmentSerializer(CamelSerializer):
    id = CharField()
    file_name = CharField(help_text="The name that people see. It is never part of a path.")
    content_type = CharField(help_text="The media type, in lower case.")
    size_bytes = IntegerField(min_value=1, help_text="The size in bytes.")
    sha256 = NullableText("The SHA-256 digest in hexadecimal, or null if none was given.")
    status = ChoiceField(
        choices=AttachmentStatus.values,
        help_text="`PENDING` until the upload is completed, then `READY`; `EXPIRED` if it was not completed in time.",
    )
    created_at = TimestampField()


class UploadSerializer(CamelSerializer):
    """How to upload the file: one request with the raw bytes as its body, these headers and no bearer token."""

    url = CharField(help_text="The signed address. It needs no other credential.")
    method = ChoiceField(choices=["PUT"], help_text="The HTTP method of the upload.")
    headers = DictField(child=CharField(), help_text="The headers that the upload must have.")
    expires_at = TimestampField(help_text="When the address stops working.")


class CreatedAttachmentSerializer(AttachmentSerializer):
    upload = UploadSerializer(help_text="How to upload the file.")


class MediaTypeField(StrictCharField):
    """One of ATTACHMENT_TYPES, in lower case and without parameters inside."""

    @property
    def pattern(self) -> str:  # type: ignore[override]
        """Without the forms that few clients send: upper case, and a parameter."""
        kinds = (re.escape(kind.lower()).replace(r"\*", "[a-z0-9][a-z0-9.+-]*") for kind in settings.ATTACHMENT_TYPES)
        return f"^({'|'.join(kinds)})$"

    def to_internal_value(self, data: Any) -> str:
        match = MEDIA_TYPE.fullmatch(super().to_internal_value(data))
        if match is None:
            raise ValidationError("Use a media type, such as text/plain; text is in UTF-8.")
        kind = match[1].lower()
        family = kind.partition("/")[0]
        if not any(allowed.lower() in (kind, f"{family}/*") for allowed in settings.ATTACHMENT_TYPES):
            raise ValidationError(f"Use one of these types: {', '.join(settings.ATTACHMENT_TYPES)}.")
        return kind


class AttachmentInput(CamelSerializer):
    # For display only, so any text is allowed; it is never part of a path.
    file_name = StrictCharField(
        min_length=1, max_length=255, trim_whitespace=False, help_text="The name that people see: 1 to 255 characters."
    )
    content_type = MediaTypeField(
        min_length=3, max_length=255, help_text="A media type that the service accepts, such as `text/plain`."
    )
    size_bytes = StrictIntegerField(min_value=1, help_text="The size of the file in bytes.")
    sha256 = StrictCharField(
        required=False,
        allow_null=True,
        validators=[RegexValidator(r"^[0-9a-fA-F]{64}$", "Use 64 hexadecimal characters.")],
        help_text="The SHA-256 digest of the file, 64 hexadecimal characters.",
    )

    def validate_sha256(self, value: str | None) -> str | None:
        return value and value.lower()


class MessageSerializer(CamelSerializer):
    id = CharField()
    chat_id = CharField()
    run_id = CharField(help_text="The run that the message started, or that wrote it.")
    role = ChoiceField(choices=Message.Role.values, help_text="Who wrote the message: the user or the assistant.")
    content = CharField(help_text="The text. The content of an assistant's message grows while its run executes.")
    attachments = AttachmentSerializer(many=True, read_only=True, help_text="The files of the message.")
    created_at = TimestampField()
    updated_at = TimestampField()
