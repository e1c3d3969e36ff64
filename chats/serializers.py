"""Chats, messages and attachments as clients see them (shapes: docs/api.md and docs/attachments.md)."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.core.validators import RegexValidator
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from chats import media
from chats.models import AttachmentStatus, Message
from config.api.serializers import CamelSerializer, StrictCharField, StrictIntegerField, TimestampField


class ChatSerializer(CamelSerializer):
    id = serializers.CharField()
    title = serializers.CharField(allow_null=True)
    active_run_id = serializers.CharField(allow_null=True)
    created_at = TimestampField()
    updated_at = TimestampField()


class ChatInput(CamelSerializer):
    title = StrictCharField(min_length=1, max_length=200, required=False, allow_null=True)


class ChatChanges(CamelSerializer):
    title = StrictCharField(min_length=1, max_length=200, allow_null=True)


class AttachmentSerializer(CamelSerializer):
    id = serializers.CharField()
    file_name = serializers.CharField()
    content_type = serializers.CharField()
    size_bytes = serializers.IntegerField(min_value=1)
    sha256 = serializers.CharField(allow_null=True)
    status = serializers.ChoiceField(choices=AttachmentStatus.values)
    created_at = TimestampField()


class UploadSerializer(CamelSerializer):
    """How to upload the file: one request with the raw bytes as its body, these headers and no bearer token."""

    url = serializers.CharField()
    method = serializers.ChoiceField(choices=["PUT"])
    headers = serializers.DictField(child=serializers.CharField())
    expires_at = TimestampField()


class CreatedAttachmentSerializer(AttachmentSerializer):
    upload = UploadSerializer()


class MediaTypeField(StrictCharField):
    """One of ATTACHMENT_TYPES, in lower case and without parameters inside."""

    def to_internal_value(self, data: Any) -> str:
        kind = media.media_type(super().to_internal_value(data))
        if kind is None:
            raise serializers.ValidationError("Use a media type, such as text/plain; text is in UTF-8.")
        if not media.is_allowed(kind):
            raise serializers.ValidationError(f"Use one of these types: {', '.join(settings.ATTACHMENT_TYPES)}.")
        return kind


class DigestField(StrictCharField):
    def to_internal_value(self, data: Any) -> str:
        return super().to_internal_value(data).lower()


class AttachmentInput(CamelSerializer):
    # For display only, so any text is allowed; it is never part of a path.
    file_name = StrictCharField(min_length=1, max_length=255, trim_whitespace=False)
    content_type = MediaTypeField(min_length=3, max_length=255)
    size_bytes = StrictIntegerField(min_value=1)
    sha256 = DigestField(
        required=False,
        allow_null=True,
        validators=[RegexValidator(r"^[0-9a-fA-F]{64}$", "Use 64 hexadecimal characters.")],
    )


class MessageSerializer(CamelSerializer):
    id = serializers.CharField()
    chat_id = serializers.CharField()
    run_id = serializers.CharField()
    role = serializers.ChoiceField(choices=Message.Role.values)
    content = serializers.CharField()
    attachments = serializers.SerializerMethodField()
    created_at = TimestampField()
    updated_at = TimestampField()

    @extend_schema_field(AttachmentSerializer(many=True))
    def get_attachments(self, message: Any) -> Any:
        return AttachmentSerializer(message.attachments.all(), many=True).data
