"""Every webhook event: its name and when it is sent. ``openapi.yaml`` has the fields of its body, which ``runs.events``
takes from the stream event.
"""

from enum import StrEnum
from typing import Self


class AnyEvent(StrEnum):
    """A member is ``NAME = name, when it is sent[, (stream event, status)[, extended]]``."""

    sent_when: str
    stream_type: str
    stream_status: str
    extended: bool

    def __new__(cls, name: str, sent_when: str, stream: tuple[str, str] = ("", ""), extended: bool = False) -> Self:
        member = str.__new__(cls, name)
        member._value_ = name
        member.sent_when, member.extended = sent_when, extended
        member.stream_type, member.stream_status = stream
        return member


class Event(AnyEvent):
    """An event of a run, written beside the stream event with this status. ``extended``: for who asked for them."""

    AGENT_STARTED = (
        "agent.started",
        "A run starts to execute, and again each time it resumes after an answer.",
        ("run.status", "running"),
    )
    AGENT_COMPLETED = "agent.completed", "A run has completed.", ("run.status", "completed")
    AGENT_FAILED = "agent.failed", "A run has failed.", ("run.status", "failed")
    TOOL_COMPLETED = "tool.completed", "A tool invocation has completed.", ("tool.completed", "COMPLETED")
    TOOL_PARKED = "tool.parked", "A tool call awaits its tool, or your app.", ("tool.parked", ""), True
    AGENT_WAITING = "agent.waiting", "A run waits for an answer.", ("run.status", "waiting"), True
    AGENT_CANCELLED = "agent.cancelled", "A run was cancelled.", ("run.status", "cancelled"), True


class CreditsEvent(AnyEvent):
    """What happens to a user's credits, for the installation endpoint alone."""

    GRANTED = "credits.granted", "Credits were granted to a user."
    LOW = "credits.low", "A user's balance has gone below one of the installation's thresholds."
    EXHAUSTED = "credits.exhausted", "A run waits or has failed because its user's credits do not reach for it."


class TrialEvent(AnyEvent):
    """For the endpoint that was asked about alone."""

    TEST = "webhook.test", "The user or staff asked for a test event."
