"""The webhook events. ``openapi.yaml`` says when each is sent, and describes its fields."""

from enum import StrEnum
from typing import Self


class Event(StrEnum):
    """An event of a run, ``NAME = name, (stream event, status), own fields[, extended]``. It reports this stream event,
    which has the values of the fields. ``extended``: only with ``extendedEvents``.
    """

    stream_type: str
    stream_status: str
    fields: tuple[str, ...]
    extended: bool

    def __new__(cls, name: str, stream: tuple[str, str], fields: tuple[str, ...] = (), extended: bool = False) -> Self:
        member = str.__new__(cls, name)
        member._value_ = name
        member.stream_type, member.stream_status = stream
        member.fields, member.extended = fields, extended
        return member

    AGENT_STARTED = "agent.started", ("run.status", "running")
    AGENT_COMPLETED = "agent.completed", ("run.status", "completed")
    AGENT_FAILED = "agent.failed", ("run.status", "failed"), ("errorCode",)
    TOOL_COMPLETED = (
        "tool.completed",
        ("tool.completed", "COMPLETED"),
        ("toolInvocationId", "name", "status", "creditUsed"),
    )
    TOOL_PARKED = "tool.parked", ("tool.parked", ""), ("toolInvocationId", "name", "awaiting", "expiresAt"), True
    AGENT_WAITING = "agent.waiting", ("run.status", "waiting"), ("waitpointId", "kind", "expiresAt"), True
    AGENT_CANCELLED = "agent.cancelled", ("run.status", "cancelled"), (), True


class CreditsEvent(StrEnum):
    """An event of a user's credits, only for the installation endpoint."""

    GRANTED = "credits.granted"
    LOW = "credits.low"
    EXHAUSTED = "credits.exhausted"


class TrialEvent(StrEnum):
    """A test event, only for the endpoint that is tested."""

    TEST = "webhook.test"
