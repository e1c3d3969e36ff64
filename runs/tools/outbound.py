"""Requests of tools to addresses that users and staff name: always through the guard, every refusal a ToolFailure."""

from __future__ import annotations

from collections.abc import Mapping

from django.conf import settings

from config.outbound import client
from config.outbound.client import Answer
from runs.tools.base import TOOL_ERROR, TOOL_TIMEOUT, ToolFailure

__all__ = ["Answer", "send", "was_cut"]

USER_AGENT = "agent-workflow-service"


def send(
    method: str, url: str, *, headers: Mapping[str, str], body: bytes | None = None, timeout_seconds: float
) -> Answer:
    """The answer, of whatever status, with at most ``TOOL_ANSWER_MAX_BYTES`` of its body. Blocking."""
    try:
        return client.send(
            method,
            url,
            headers={"User-Agent": USER_AGENT, **headers},
            body=body,
            connect_timeout=settings.OUTBOUND_CONNECT_TIMEOUT_SECONDS,
            total_timeout=timeout_seconds,
            max_bytes=settings.TOOL_ANSWER_MAX_BYTES,
            allow_private=settings.OUTBOUND_ALLOW_PRIVATE,
        )
    except client.RequestTimedOut as error:
        raise ToolFailure(TOOL_TIMEOUT, str(error)) from None
    except (client.AddressRefused, client.RequestFailed, ValueError) as error:
        raise ToolFailure(TOOL_ERROR, str(error)) from None


def was_cut(answer: Answer) -> bool:
    """Whether the body was too long, as opposed to one that broke off."""
    return answer.truncated and len(answer.body) >= settings.TOOL_ANSWER_MAX_BYTES
