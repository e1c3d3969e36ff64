"""The app, and the check of the settings of attachments and of the file storage."""

from typing import Any

from django.apps import AppConfig
from django.conf import settings
from django.core.checks import CheckMessage, Error, Tags, register

from chats.media import media_type
from config.checks import is_http_url


class ChatsConfig(AppConfig):
    name = "chats"


@register(Tags.files)
def check_files(app_configs: Any = None, **kwargs: Any) -> list[CheckMessage]:
    found: list[CheckMessage] = []
    for kind in settings.ATTACHMENT_TYPES:
        if media_type(kind.removesuffix("*") + "x" if kind.endswith("/*") else kind) is None:
            hint = "Set ATTACHMENT_TYPES to types such as text/*,application/pdf,image/png"
            found.append(Error(f"ATTACHMENT_TYPES: {kind} is not a media type.", hint=hint, id="chats.E001"))
    if settings.STORAGE_S3_ENDPOINT and not is_http_url(settings.STORAGE_S3_ENDPOINT):
        hint = "Set STORAGE_S3_ENDPOINT to https://…, or leave it out for Amazon's own."
        found.append(Error("STORAGE_S3_ENDPOINT is not an http(s) address.", hint=hint, id="chats.E002"))
    if bool(settings.STORAGE_S3_ACCESS_KEY) != bool(settings.STORAGE_S3_SECRET_KEY):
        hint = "Set STORAGE_S3_ACCESS_KEY and STORAGE_S3_SECRET_KEY both, or neither."
        found.append(Error("One of the object storage's two keys is missing.", hint=hint, id="chats.E003"))
    return found
