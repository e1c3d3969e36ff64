"""Every webhook event: its name, when it is sent, and its own fields. ``openapi.yaml`` has the shared fields."""

from enum import StrEnum
from typing import Any, Self


def field(description: str, example: Any, **schema: Any) -> dict[str, Any]:
    """A field of a body in the API document. Its value is a string, unless ``schema`` names another type."""
    return {"type": "string", **schema, "description": description, "example": example}


class AnyEvent(StrEnum):
    """A member is ``NAME = name, when it is sent[, fields[, (stream event, status)[, extended]]]``."""

    def __new__(cls, name: str, *about: Any) -> Self:
        member = str.__new__(cls, name)
        member._value_ = name
        return member

    def __init__(
        self, name: str, sent_when: str, fields: Any = None, stream: tuple[str, str] = ("", ""), extended: bool = False
    ) -> None:
        self.sent_when, self.extended = sent_when, extended
        self.fields: dict[str, dict[str, Any]] = fields or {}
        self.stream_type, self.stream_status = stream


class Event(AnyEvent):
    """An event of a run, which reports this stream event. ``extended``: only with ``extendedEvents``."""

    AGENT_STARTED = (
        "agent.started",
        "A run starts to execute, and again each time it resumes after an answer.",
        None,
        ("run.status", "running"),
    )
    AGENT_COMPLETED = "agent.completed", "A run has completed.", None, ("run.status", "completed")
    AGENT_FAILED = (
        "agent.failed",
        "A run has failed.",
        {"errorCode": field("Why the run failed, for programs.", "MODEL_TIMEOUT")},
        ("run.status", "failed"),
    )
    TOOL_COMPLETED = (
        "tool.completed",
        "A tool invocation has completed.",
        {
            "toolInvocationId": field("The id of the tool invocation.", "inv_01kb5w3v4z5a6b7c8d9e0f1g2h"),
            "name": field("The name of the tool.", "draw_chart"),
            "status": field("The status of the call.", "COMPLETED", enum=["COMPLETED"]),
            "creditUsed": field("What the call cost, in credits.", 12, type="number"),
        },
        ("tool.completed", "COMPLETED"),
    )
    TOOL_PARKED = (
        "tool.parked",
        "A tool call awaits its tool, or your app.",
        {
            "toolInvocationId": field("The id of the tool invocation.", "inv_01kb5w3v4z5a6b7c8d9e0f1g2h"),
            "name": field("The name of the tool.", "make_video"),
            "awaiting": field("Who gives the outcome, the tool or the caller's app.", "tool", enum=["tool", "client"]),
            "expiresAt": field(
                "When the call fails without an outcome.", "2026-11-21T12:34:56.789Z", format="date-time"
            ),
        },
        ("tool.parked", ""),
        True,
    )
    AGENT_WAITING = (
        "agent.waiting",
        "A run waits for an answer.",
        {
            "waitpointId": field("The id of the waitpoint.", "wp_01kb5w3v5p6q7r8s9t0v1w2x3y"),
            "kind": field("What is asked.", "CREDIT_APPROVAL", enum=["CREDIT_APPROVAL", "CLARIFICATION"]),
            "expiresAt": field("When the run fails if nobody answers.", "2026-11-21T12:34:56.789Z", format="date-time"),
        },
        ("run.status", "waiting"),
        True,
    )
    AGENT_CANCELLED = "agent.cancelled", "A run was cancelled.", None, ("run.status", "cancelled"), True


class CreditsEvent(AnyEvent):
    """An event of a user's credits, only for the installation endpoint."""

    GRANTED = (
        "credits.granted",
        "Credits were granted to a user.",
        {
            "ledgerId": field("The id of the grant's row of the ledger.", "led_01kb5w3v1c4d5e6f7g8h9j0k1m"),
            "reference": field(
                "What the backend named the payment, or null for a grant by staff or at sign-up.",
                "pay_2f9c",
                type=["string", "null"],
            ),
            "amount": field("The credits.", 25, type="number"),
        },
    )
    LOW = (
        "credits.low",
        "A user's balance has gone below one of the installation's thresholds.",
        {
            "available": field("What the user can spend.", 4.875, type="number"),
            "threshold": field("The threshold, one of CREDITS_LOW_THRESHOLDS.", 5, type="number"),
        },
    )
    EXHAUSTED = (
        "credits.exhausted",
        "A run waits or has failed because its user's credits are not enough for it.",
        {
            "available": field("What the user can spend.", 0.1, type="number"),
            "runId": field("The run.", "run_01kb5w3v1c4d5e6f7g8h9j0k1m"),
        },
    )


class TrialEvent(AnyEvent):
    """A test event, only for the endpoint that is tested."""

    TEST = "webhook.test", "The user or staff asked for a test event."
