"""How much a run's next request to a model may cost, and what a request cost that ended early.

The bound of the tokens in is never under what a provider counts, because credits are held for it: a token is at least
one byte of the request.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django.conf import settings

from chats.media import is_text
from config.kernel.jsontext import to_text
from credits import ledger, sums
from credits.models import LedgerEntry
from runs import lifecycle
from runs.catalogue.definitions import ModelDefinition
from runs.catalogue.providers import KINDS
from runs.errors import RunError
from runs.llm.base import (
    CHARS_PER_TOKEN,
    AssistantMessage,
    AttachedFile,
    ModelRequest,
    ToolCall,
    ToolMessage,
    Usage,
    UserMessage,
    estimate_tokens,
    transcript_chars,
)
from runs.llm.transcript import arguments_object
from runs.models import Run, Turn

# What formats and providers add around a request, and around each message, call, tool and file.
REQUEST_TOKENS = 1000
ITEM_TOKENS = 120
# Each of a turn's four amounts is rounded.
ROUNDING = 4
ANY_NUMBER = 10**9
EXPONENT = re.compile("[0-9][eE]")
# Another run of the user can take the credits between the look at them and the hold.
TRIES = 10


@dataclass(frozen=True, slots=True)
class Allowance:
    """``hold`` is None for a free model. ``size`` is the request's size, for the bound of the next turn."""

    hold: LedgerEntry | None
    output_tokens: int
    size: int


Refusal = tuple[str, str]


def allow(run: Run, request: ModelRequest, turns: Sequence[Turn], step: tuple[int | str, int]) -> Allowance | Refusal:
    """Hold the most that the request can cost, with an output limit that credits and budget reach for. ``step`` are the
    turn's index, or the key of a compaction, and the number of the request under the run's lease; ``turns`` end with
    the one that the request is a continuation of, if any.

    Returns (errorCode, message) if they do not reach for MODEL_MIN_OUTPUT_TOKENS. Raises LeaseLost.
    """
    model, size = request.model, request_size(request)
    if not (model.price_in or model.price_out or model.price_cached_in or model.price_cache_write):
        return Allowance(None, request.max_output_tokens, size)
    tokens = bound(request, size, turns)
    limit = _most(model, tokens, request.max_output_tokens)
    refusal: Refusal = (RunError.INSUFFICIENT_CREDITS, "The available credits do not suffice for the next turn.")
    if run.max_credits is not None and (left := run.max_credits - sums.committed(run.id)) < limit:
        limit, refusal = left, (RunError.BUDGET_EXCEEDED, "The run's maxCredits do not suffice for the next turn.")
    for _ in range(TRIES):
        output_tokens = _affordable(model, tokens, limit, request.max_output_tokens)
        if output_tokens < min(settings.MODEL_MIN_OUTPUT_TOKENS, request.max_output_tokens):
            # The answer to this step's commit may have been lost: then the budget does not reach for a second hold.
            held = lifecycle.held_turn(run, *step)
            return Allowance(held, (held.price or {})["outputTokens"], size) if held else refusal
        price = {
            "model": model.name,
            "in": model.price_in,
            "out": model.price_out,
            "inputTokens": tokens,
            "outputTokens": output_tokens,
            "estimatedTokens": estimate_tokens(transcript_chars(request)),
            "charsPerToken": CHARS_PER_TOKEN,
        }
        try:
            hold = lifecycle.hold_turn(run, *step, _most(model, tokens, output_tokens), price)
        except ledger.InsufficientCredits:
            available = ledger.available(run.user_id)
            if available < limit:
                refusal = (RunError.INSUFFICIENT_CREDITS, "The available credits do not suffice for the next turn.")
            limit = min(limit, available)
            continue
        # A repeated call has the hold of the first.
        return Allowance(hold, (hold.price or {})["outputTokens"] if hold else output_tokens, size)
    return refusal


def _price_in(model: ModelDefinition) -> int:
    return max(model.price_in, model.price_cached_in, model.price_cache_write)


def _most(model: ModelDefinition, input_tokens: int, output_tokens: int) -> int:
    """The most that so many tokens cost, in micro-credits."""
    return -(-input_tokens * _price_in(model) // 1000) - (-output_tokens * model.price_out // 1000) + ROUNDING


def _affordable(model: ModelDefinition, input_tokens: int, limit: int, most: int) -> int:
    """The output limit, at most ``most``, that ``limit`` micro-credits reach for; negative if not for the input."""
    left = limit - _most(model, input_tokens, 0)
    if left < 0:
        return -1
    return min(most, left * 1000 // model.price_out) if model.price_out else most


def request_size(request: ModelRequest) -> int:
    """An upper bound of the request's tokens: the bytes of its text, and a bound for each file and for what providers
    add.
    """
    if KINDS[request.model.server.kind].counts_as_we_do:
        return estimate_tokens(transcript_chars(request))
    size = REQUEST_TOKENS + len(request.instructions.encode()) + _bytes(request.model.parameters.get("extra", {}))
    for tool in request.tools:
        size += ITEM_TOKENS + _bytes([tool.name, tool.description, tool.input_schema])
    for message in request.messages:
        size += ITEM_TOKENS
        match message:
            case UserMessage():
                size += len(message.text.encode()) + sum(map(_file_tokens, message.files))
            case AssistantMessage():
                size += len(message.text.encode()) + (_bytes(message.reasoning) if message.reasoning else 0)
                size += sum(map(_call_bytes, message.tool_calls))
            case ToolMessage():
                size += len(message.content.encode()) + sum(map(_file_tokens, message.files))
    return size


def _bytes(value: Any) -> int:
    return len(to_text(value).encode())


def _call_bytes(call: ToolCall) -> int:
    # The name counts twice, because a format can also need the tool's definition. Malformed arguments are sent as an
    # escaped text within an object, and a number such as 1E15 with all its digits.
    sent = _bytes(arguments_object(call.arguments)) if EXPONENT.search(call.arguments) else 0
    return 2 * ITEM_TOKENS + _bytes([call.name, call.name]) + max(_bytes(call.arguments), sent)


def _file_tokens(file: AttachedFile) -> int:
    """A document can hold any number of pages in few bytes: it counts as much as fits into the model's window."""
    label = 2 * ITEM_TOKENS + _bytes(file.name)
    if is_text(file.content_type):
        return label + file.size_bytes
    return label + (settings.MODEL_IMAGE_TOKENS_MAX if file.content_type.startswith("image/") else ANY_NUMBER)


def bound(request: ModelRequest, size: int, turns: Sequence[Turn]) -> int:
    """An upper bound of the tokens that the provider will count. From the second turn on, it is what the provider
    counted last and the bytes that were added since. No request is larger than the model's window.
    """
    last = turns[-1] if turns else None
    if last is not None and last.origin == request.model.origin and not last.estimated and last.request_size:
        size = min(size, last.input_tokens + max(0, size - last.request_size))
    return min(size, request.model.context_tokens)


def counts(model: ModelDefinition, usage: Usage) -> dict[str, Any]:
    """The counts and prices that the ledger keeps with a charge."""
    price: dict[str, Any] = {
        "model": model.name,
        "inputTokens": usage.input_tokens,
        "outputTokens": usage.output_tokens,
        "in": model.price_in,
        "out": model.price_out,
    }
    if usage.cached_tokens:
        price |= {"cachedInputTokens": usage.cached_tokens, "cachedIn": model.price_cached_in}
    if usage.cache_write_tokens:
        price |= {"cacheWriteTokens": usage.cache_write_tokens, "cacheWrite": model.price_cache_write}
    if usage.estimated:
        price["estimated"] = True
    return price


def charge_of(model: ModelDefinition, usage: Usage, hold: LedgerEntry | None) -> lifecycle.Charge | None:
    """What the usage costs; None for a free model."""
    if hold is None:
        return None
    amount = model.cost(usage.input_tokens, usage.cached_tokens, usage.cache_write_tokens, usage.output_tokens)
    return lifecycle.Charge(hold, amount, counts(model, usage))


def partial_charge(request: ModelRequest, allowance: Allowance) -> lifecycle.Charge | None:
    """What a request cost that ended early, by the provider's counts or an estimate; None if no answer had begun."""
    usage = request.progress.usage
    return None if usage is None else charge_of(request.model, usage(), allowance.hold)
