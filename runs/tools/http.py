"""Tools that staff add, each an HTTP endpoint.

POST of ``{invocationId, runId, input}``, answered with ``{result, resultUrls?, creditUsed?}``.

The endpoint is told the invocation's id as its ``Idempotency-Key``, the same whenever a call is made again.
"""

from __future__ import annotations

import json
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

import simplejson
from django.conf import settings

from config.kernel.money import MICRO
from runs.tools import outbound
from runs.tools.base import TOOL_ERROR, ToolContext, ToolDefinition, ToolFailure, ToolResult, in_thread


async def execute(definition: ToolDefinition, input: dict[str, Any], context: ToolContext) -> ToolResult:
    """Posts the call. Anything but a 2xx answer of that shape, within ``TOOL_ANSWER_MAX_BYTES``, is ``TOOL_ERROR``."""
    body = json.dumps({"invocationId": context.invocation_id, "runId": context.run_id, "input": input}).encode()
    headers = {
        **definition.secret_headers,
        "Content-Type": "application/json",
        "Accept": "application/json",
        "Idempotency-Key": context.invocation_id,
    }
    answer = await in_thread(
        context,
        outbound.send,
        "POST",
        definition.url,
        headers=headers,
        body=body,
        timeout_seconds=context.timeout_seconds,
    )
    if not 200 <= answer.status < 300:
        raise ToolFailure(TOOL_ERROR, f"{definition.name} answered with HTTP status {answer.status}.")
    if outbound.was_cut(answer):
        raise ToolFailure(
            TOOL_ERROR, f"{definition.name} answered with more than {settings.TOOL_ANSWER_MAX_BYTES} bytes."
        )
    if answer.truncated:
        raise ToolFailure(TOOL_ERROR, f"The answer of {definition.name} broke off.")
    return _result(definition, answer.body)


def _result(definition: ToolDefinition, body: bytes) -> ToolResult:
    try:
        answer = json.loads(body, parse_float=Decimal, parse_constant=_no_constant)
    except (ValueError, ArithmeticError, RecursionError):
        raise ToolFailure(TOOL_ERROR, f"{definition.name} did not answer with valid JSON.") from None
    if not isinstance(answer, dict) or "result" not in answer:
        raise ToolFailure(TOOL_ERROR, f"{definition.name} answered without a result.")
    return ToolResult(
        _text(definition, answer["result"]),
        _urls(definition, answer.get("resultUrls")),
        _credit_used(definition, answer.get("creditUsed")),
    )


def _no_constant(name: str) -> Any:
    raise ValueError(name)


def _text(definition: ToolDefinition, result: Any) -> str:
    """A text as it is, anything else as JSON."""
    if isinstance(result, str):
        return result
    try:
        return simplejson.dumps(result, use_decimal=True, ensure_ascii=False)
    except (ValueError, RecursionError):
        raise ToolFailure(TOOL_ERROR, f"{definition.name} answered with a result that can't be read.") from None


def _urls(definition: ToolDefinition, urls: Any) -> tuple[str, ...]:
    if urls is None:
        return ()
    if not isinstance(urls, list) or not all(isinstance(url, str) for url in urls):
        raise ToolFailure(TOOL_ERROR, f"{definition.name} answered with resultUrls that are no list of texts.")
    return tuple(urls)


def _credit_used(definition: ToolDefinition, credits: Any) -> int | None:
    """Micro-credits, rounded half up, at most the price: the caller agreed to no more."""
    if credits is None:
        return None
    if isinstance(credits, bool) or not isinstance(credits, (int, Decimal)) or credits < 0:
        raise ToolFailure(TOOL_ERROR, f"{definition.name} answered with a creditUsed that is no amount.")
    # Compared before it is scaled: 1e999999 must not become an integer.
    if credits >= Decimal(definition.price) / MICRO:
        return definition.price
    return int((Decimal(credits) * MICRO).to_integral_value(ROUND_HALF_UP))
