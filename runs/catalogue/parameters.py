"""A model's parameters: what a request to it sets beside its messages and tools."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from config.kernel.jsontext import to_text

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
STOPS_MAX = 4
STOP_MAX_CHARS = 200
EXTRA_MAX_CHARS = 16 * 1024
# The service sets these itself.
RESERVED = {"model", "messages", "input", "instructions", "system", "tools", "tool_choice", "stream", "stream_options"}
RESERVED |= {"max_tokens", "max_completion_tokens", "max_output_tokens", "store", "include", "n"}


def check_parameters(value: Any) -> dict[str, Any]:
    """``value``, if it is an object of ``temperature`` (0 to 2), ``topP`` (0 to 1), ``reasoningEffort``, ``stop`` (up
    to 4 texts), ``seed`` (a whole number) and ``extra`` (an object that is merged into the request's body). A kind of
    provider without ``stop`` (openai_responses) or ``seed`` (openai_responses, anthropic) is not sent it.

    Raises ValueError with a message for people.
    """
    if not isinstance(value, dict):
        raise ValueError("The parameters must be a JSON object.")
    for name, given in value.items():
        check = CHECKS.get(name)
        if check is None:
            raise ValueError(f"There is no parameter {name!r}; there are {', '.join(CHECKS)}.")
        if problem := check(given):
            raise ValueError(f"{name} must be {problem}.")
    return value


def _number(low: float, high: float) -> Any:
    def check(value: Any) -> str:
        is_number = isinstance(value, (int, float, Decimal)) and not isinstance(value, bool)
        return "" if is_number and low <= value <= high else f"a number from {low:g} to {high:g}"

    return check


def _effort(value: Any) -> str:
    return "" if value in EFFORTS else f"one of {', '.join(EFFORTS)}"


def _stop(value: Any) -> str:
    fits = isinstance(value, list) and 1 <= len(value) <= STOPS_MAX
    fits = fits and all(isinstance(text, str) and 1 <= len(text) <= STOP_MAX_CHARS for text in value)
    return "" if fits else f"a list of 1 to {STOPS_MAX} texts of 1 to {STOP_MAX_CHARS} characters"


def _seed(value: Any) -> str:
    return "" if type(value) is int and abs(value) < 2**63 else "a whole number"


def _extra(value: Any) -> str:
    if not isinstance(value, dict) or len(to_text(value)) > EXTRA_MAX_CHARS:
        return f"a JSON object of at most {EXTRA_MAX_CHARS} characters"
    taken = sorted(RESERVED & value.keys())
    return f"an object without {', '.join(taken)}, which the service sets itself" if taken else ""


CHECKS = {
    "temperature": _number(0, 2),
    "topP": _number(0, 1),
    "reasoningEffort": _effort,
    "stop": _stop,
    "seed": _seed,
    "extra": _extra,
}
