"""The error codes of runs and tool calls, and the reasons why models fail, each with a sentence for staff."""

from enum import StrEnum
from typing import Self


class _Code(StrEnum):
    sentence: str
    message: str
    retried: bool

    def __new__(cls, code: str, sentence: str, message: str = "", retried: bool = False) -> Self:
        member = str.__new__(cls, code)
        member._value_ = code
        member.sentence, member.message, member.retried = sentence, message, retried
        return member


class RunError(_Code):
    """The ``errorCode`` of a run that has failed."""

    MODEL_ERROR = "MODEL_ERROR", "The model, or the connection to it, failed."
    MODEL_TIMEOUT = "MODEL_TIMEOUT", "The model did not answer in time."
    CONTEXT_LENGTH_EXCEEDED = "CONTEXT_LENGTH_EXCEEDED", "One message alone is too long for the model."
    OUTPUT_INVALID = "OUTPUT_INVALID", "The model gave no output that fits the schema."
    TURN_LIMIT_EXCEEDED = "TURN_LIMIT_EXCEEDED", "The run needed more turns than the limit allows."
    CALL_LIMIT_EXCEEDED = "CALL_LIMIT_EXCEEDED", "The run needed more tool calls than the limit allows."
    RUN_TIMEOUT = "RUN_TIMEOUT", "The run took longer than the limit allows."
    INSUFFICIENT_CREDITS = "INSUFFICIENT_CREDITS", "The user had no credits left."
    BUDGET_EXCEEDED = "BUDGET_EXCEEDED", "The run spent its own budget."
    WAITPOINT_EXPIRED = "WAITPOINT_EXPIRED", "Nobody answered in time."
    WORKER_LOST = "WORKER_LOST", "The run lost its worker too often."
    INTERNAL_ERROR = "INTERNAL_ERROR", "An error of this service. Its logs say more."


class CallError(_Code):
    """The ``errorCode`` of a tool call that has failed or was refused."""

    INVALID_INPUT = "INVALID_INPUT", "The arguments do not fit the tool's schema."
    UNKNOWN_TOOL = "UNKNOWN_TOOL", "There is no such tool, or the run may not use it."
    TOOL_ERROR = "TOOL_ERROR", "The tool failed."
    TOOL_TIMEOUT = "TOOL_TIMEOUT", "The tool did not answer in time."
    INSUFFICIENT_CREDITS = "INSUFFICIENT_CREDITS", "The user's credits were too low for the call."
    BUDGET_EXCEEDED = "BUDGET_EXCEEDED", "The call would have taken the run over its own budget."
    APPROVAL_REFUSED = "APPROVAL_REFUSED", "The user refused the call."
    OUTCOME_UNKNOWN = "OUTCOME_UNKNOWN", "The worker was lost during the call, and the tool may not be called twice."


# The messages for callers: they say nothing about providers, settings or addresses.
_AWAY = "The model is not available at the moment. Try again later."
_NOT_SET_UP = "The model is not available at the moment."
_REFUSED = "The model could not process the request."
_BROKE = "The model's answer broke off. Try again later."
_SLOW = "The model did not answer in time."
_FILTERED = "The model's content filter stopped the answer."
_TOO_LONG = "The conversation is too long for the model."
_CUT = "The model reached its output limit within a tool call. Make the task smaller."
_TOO_MUCH = "The model's answer was too long."


class FailureReason(_Code):
    """Why a request to a model failed, for staff: a closed list, so that no text of a provider is quoted. ``retried``:
    the same model is asked again; after a 429, it is asked again whatever the reason.
    """

    PROVIDER_MISSING = "provider_missing", "The provider is not set up: its kind or address is wrong.", _NOT_SET_UP
    PROVIDER_KEY_MISSING = "provider_key_missing", "The provider has no key.", _NOT_SET_UP
    PROVIDER_UNAUTHORIZED = "provider_unauthorized", "The provider refused the key (401, 403).", _NOT_SET_UP
    PROVIDER_RATE_LIMITED = "provider_rate_limited", "The provider's rate limit is reached (429).", _AWAY, True
    PROVIDER_QUOTA_EXCEEDED = "provider_quota_exceeded", "The provider's quota or balance is used up.", _NOT_SET_UP
    PROVIDER_UNAVAILABLE = "provider_unavailable", "The provider failed (408, 409, 425, 5xx).", _AWAY, True
    PROVIDER_UNREACHABLE = "provider_unreachable", "No connection to the provider.", _AWAY, True
    CONNECTION_LOST = "connection_lost", "The connection broke before the answer was complete.", _BROKE, True
    MODEL_UNKNOWN = "model_unknown", "The catalogue or the provider does not know the model.", _NOT_SET_UP
    REQUEST_REFUSED = "request_refused", "The provider refused the request (400, 422).", _REFUSED
    CONTEXT_TOO_LONG = "context_too_long", "The request is too long for the model (413, 400).", _TOO_LONG
    MALFORMED_ANSWER = "malformed_answer", "The provider's answer was not valid.", _BROKE, True
    NO_TEXT = "no_text", "The answer, which is to be a summary, has no text.", _BROKE
    NOT_A_STREAM = "not_a_stream", "The address answers, but not as a model does.", _NOT_SET_UP
    CONTENT_FILTERED = "content_filtered", "The provider's content filter stopped the answer.", _FILTERED
    OUTPUT_LIMIT = "output_limit", "The output limit was reached within a tool call.", _CUT
    ANSWER_TOO_LONG = "answer_too_long", "The answer has more text or tool calls than the limits allow.", _TOO_MUCH
    TIME_OUT = "time_out", "The answer took longer than MODEL_TIMEOUT_SECONDS.", _SLOW
    STALLED = "stalled", "The provider sent nothing for 120 seconds.", _SLOW, True
    MODEL_FAILED = "model_failed", "The model said that it failed.", _REFUSED

    @property
    def code(self) -> RunError:
        """The run's ``errorCode``."""
        if self in (FailureReason.TIME_OUT, FailureReason.STALLED):
            return RunError.MODEL_TIMEOUT
        return RunError.CONTEXT_LENGTH_EXCEEDED if self == FailureReason.CONTEXT_TOO_LONG else RunError.MODEL_ERROR
