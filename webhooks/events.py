"""Every webhook event: its name, when it is sent, and its fields with an example each.

To add an event, add a member here and emit it in its transition. The outbox, the OpenAPI document, the admin and the
invariants read this table. How an event is stored and sent does not belong here.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Self

Fields = dict[str, dict[str, Any]]
"""The JSON schema of each field, with an example."""
TEXT = {"type": "string"}


def text(description: str, example: str, **more: Any) -> dict[str, Any]:
    return {"type": "string", "description": description, **more, "example": example}


NO_FIELDS: Fields = {}
USER_ID = text("The username of the run's user. Only the installation endpoint gets this field.", "alice")
WAITING_FIELDS = {
    "waitpointId": text("The id of the waitpoint.", "wp_01kb5w3v5p6q7r8s9t0v1w2x3y"),
    "kind": text("What is asked.", "CREDIT_APPROVAL", enum=["CREDIT_APPROVAL", "CLARIFICATION"]),
    "expiresAt": text("When the run fails if nobody answers.", "2026-11-21T12:34:56.789Z", format="date-time"),
}
CALL_FIELDS = {
    "toolInvocationId": text("The id of the tool invocation.", "inv_01kb5w3v4z5a6b7c8d9e0f1g2h"),
    "name": text("The name of the tool.", "draw_chart"),
    "status": text("The status of the call.", "COMPLETED", enum=["COMPLETED"]),
    "creditUsed": {"type": "number", "description": "What the call cost, in credits.", "example": 12},
}


class Event(StrEnum):
    """A member is ``NAME = name, when it is sent, (stream event, status), fields of its own[, extended]``.

    The stream event with this status is written by the same transition: the invariants compare their numbers. An
    endpoint gets an ``extended`` event only if it asked for them.
    """

    AGENT_STARTED = (
        "agent.started",
        "A run starts to execute, and again each time it resumes after an answer.",
        ("run.status", "running"),
        NO_FIELDS,
    )
    AGENT_COMPLETED = "agent.completed", "A run has completed.", ("run.status", "completed"), NO_FIELDS
    AGENT_FAILED = (
        "agent.failed",
        "A run has failed.",
        ("run.status", "failed"),
        {"errorCode": text("Why the run failed, for programs.", "MODEL_TIMEOUT")},
    )
    TOOL_COMPLETED = (
        "tool.completed",
        "A tool invocation has completed.",
        ("tool.completed", "COMPLETED"),
        CALL_FIELDS,
    )
    AGENT_WAITING = (
        "agent.waiting",
        "A run waits for an answer.",
        ("run.status", "waiting"),
        WAITING_FIELDS,
        True,
    )
    AGENT_CANCELLED = "agent.cancelled", "A run was cancelled.", ("run.status", "cancelled"), NO_FIELDS, True

    sent_when: str
    stream_type: str
    stream_status: str
    own_fields: Fields
    extended: bool

    def __new__(
        cls, name: str, sent_when: str, stream: tuple[str, str], own_fields: Fields, extended: bool = False
    ) -> Self:
        member = str.__new__(cls, name)
        member._value_ = name
        member.sent_when, member.own_fields, member.extended = sent_when, own_fields, extended
        member.stream_type, member.stream_status = stream
        return member

    @property
    def fields(self) -> Fields:
        """The body's fields in order: those of every event, then the event's own."""
        return {
            "id": text("The id of the event, the same on every attempt.", "evt_01kb5w3v2m8x4c9z6t7q0r1s2d"),
            "type": text("The name of the event.", self.value, const=self.value),
            "runId": text("The id of the run.", "run_01kb5w3v1c4d5e6f7g8h9j0k1m"),
            "chatId": text("The id of the chat.", "chat_01kb5w3tzp2q3r4s5t6v7w8x9y"),
            "occurredAt": text("When it happened.", "2026-11-20T12:34:56.789Z", format="date-time"),
            **self.own_fields,
        }


EXTENDED_EVENTS = frozenset(event for event in Event if event.extended)
