"""The filters of lists of chats and messages: how callers write them, and what they mean. Lists of runs share
``replaced``.
"""

from __future__ import annotations

from django.utils.datastructures import MultiValueDict
from drf_spectacular.utils import OpenApiParameter

from chats.serializers import CLIENT_ID_PROBLEM
from chats.services import CLIENT_ID
from config.kernel.errors import ValidationFailed

CLIENT_ID_PARAMETER = OpenApiParameter(
    "clientId",
    {"type": "string", "pattern": f"^{CLIENT_ID.pattern}$"},
    description="Only the chat with this client id.",
)
REPLACED = OpenApiParameter(
    "replaced",
    {"type": "string", "enum": ["true", "false"], "default": "false"},
    description="`true`: with those that were replaced by a later run, which are left out otherwise.",
)


def client_id(query: MultiValueDict[str, str]) -> str | None:
    """The ``clientId`` of a query. Raises ValidationFailed."""
    text = query.get("clientId")
    if text is not None and not CLIENT_ID.fullmatch(text):
        raise ValidationFailed({"clientId": [CLIENT_ID_PROBLEM]})
    return text


def shows_replaced(query: MultiValueDict[str, str]) -> bool:
    """Whether the query asks for replaced rows too. Raises ValidationFailed."""
    text = query.get("replaced", "false")
    if text not in ("true", "false"):
        raise ValidationFailed({"replaced": ["Use true or false."]})
    return text == "true"
