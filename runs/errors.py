"""The error codes of runs and of tool calls, each with a sentence for staff. What a caller reads is the message that is
given where the error is raised.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class _Code(StrEnum):
    sentence: str

    def __new__(cls, code: str, sentence: str) -> Self:
        member = str.__new__(cls, code)
        member._value_ = code
        member.sentence = sentence
        return member


class RunError(_Code):
    """The ``errorCode`` of a run that has failed."""

    MODEL_ERROR = "MODEL_ERROR", "The model, or the connection to it, failed."
    MODEL_TIMEOUT = "MODEL_TIMEOUT", "The model did not answer in time."
    TURN_LIMIT_EXCEEDED = "TURN_LIMIT_EXCEEDED", "The run needed more turns than the limit allows."
    CALL_LIMIT_EXCEEDED = "CALL_LIMIT_EXCEEDED", "The run needed more tool calls than the limit allows."
    RUN_TIMEOUT = "RUN_TIMEOUT", "The run took longer than the limit allows."
    INSUFFICIENT_CREDITS = "INSUFFICIENT_CREDITS", "The user had no credits left."
    BUDGET_EXCEEDED = "BUDGET_EXCEEDED", "The run spent its own budget."
    WAITPOINT_EXPIRED = "WAITPOINT_EXPIRED", "Nobody answered in time."
    WORKER_LOST = "WORKER_LOST", "The run lost its worker too often."
    INTERNAL_ERROR = "INTERNAL_ERROR", "A fault of this service; its logs say more."


class CallError(_Code):
    """The ``errorCode`` of a tool call that has failed or was refused."""

    INVALID_INPUT = "INVALID_INPUT", "The arguments do not fit the tool's schema."
    UNKNOWN_TOOL = "UNKNOWN_TOOL", "There is no such tool, or the run may not use it."
    TOOL_ERROR = "TOOL_ERROR", "The tool failed."
    TOOL_TIMEOUT = "TOOL_TIMEOUT", "The tool did not answer in time."
    INSUFFICIENT_CREDITS = "INSUFFICIENT_CREDITS", "The user's credits did not suffice for the call."
    BUDGET_EXCEEDED = "BUDGET_EXCEEDED", "The call would have taken the run over its own budget."
    APPROVAL_REFUSED = "APPROVAL_REFUSED", "The user refused the call."
    OUTCOME_UNKNOWN = "OUTCOME_UNKNOWN", "A worker died during the call, and the tool may not be called twice."
