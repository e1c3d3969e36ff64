"""HTTP requests of tools, and the tool type ``http``: an endpoint that staff add to the catalogue.

A call is a POST of ``{invocationId, runId, chatId, userId, input}``. Any 2xx answer is its result: a JSON object with
``result`` is ``{result, resultUrls?, creditUsed?}``; an image is stored; any other JSON or text is the result itself.
The ``Idempotency-Key`` is the invocation's id, the same at each attempt of a call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import ROUND_HALF_UP, Decimal
from typing import Any, NoReturn

from django.conf import settings

from config.kernel import clock
from config.kernel.jsontext import dumps, has_more_values
from config.kernel.money import MICRO
from config.outbound import client
from config.outbound.client import Answer
from config.outbound.loop import shared
from runs.errors import CallError
from runs.tools.base import ToolContext, ToolDefinition, ToolFailure, ToolResult, result_text, shorten, tool_error
from runs.tools.files import image_of
from webhooks.signing import standard_signature

USER_AGENT = "agent-workflow-service"
# Far more than a model can read of a result, and few enough to be read and written within a moment.
VALUES_MAX = 250_000
# Of the body of an answer that is not a result.
REASON_CHARS = 300
REASON_BYTES = 32 * 1024


async def send(
    context: ToolContext,
    method: str,
    url: str,
    *,
    headers: Mapping[str, str],
    body: bytes | None = None,
    timeout_seconds: float,
) -> Answer:
    """The answer, of any status, with at most ``TOOL_ANSWER_MAX_BYTES`` of its body. Raises ToolFailure."""
    request = client.asend(
        method,
        url,
        headers={"User-Agent": USER_AGENT, **headers},
        body=body,
        connect_timeout=settings.OUTBOUND_CONNECT_TIMEOUT_SECONDS,
        total_timeout=timeout_seconds,
        max_bytes=settings.TOOL_ANSWER_MAX_BYTES,
        allow_private=settings.OUTBOUND_ALLOW_PRIVATE,
        owner=str(context.user_id),
    )
    try:
        return await shared.run(request)
    except client.RequestTimedOut as error:
        raise ToolFailure(CallError.TOOL_TIMEOUT, str(error)) from None
    except (client.AddressRefused, client.RequestFailed, ValueError) as error:
        raise tool_error(str(error)) from None


def is_too_long(answer: Answer) -> bool:
    """Whether the body was truncated at the limit, and not by a connection that broke."""
    return answer.truncated and len(answer.body) >= settings.TOOL_ANSWER_MAX_BYTES


async def execute(definition: ToolDefinition, input: dict[str, Any], context: ToolContext) -> ToolResult:
    """Post the call. Raises ToolFailure ``TOOL_ERROR`` unless the answer is 2xx, complete and within the limits."""
    call = {
        "invocationId": context.invocation_id,
        "runId": context.run_id,
        "chatId": context.chat_id,
        "userId": context.user_name,
        "input": input,
    }
    body = dumps(call)
    headers = {
        **definition.secret_headers,
        "Content-Type": "application/json",
        "Accept": "application/json, image/*;q=0.5",
        "Idempotency-Key": context.invocation_id,
        **_signature(definition, context.invocation_id, body),
    }
    answer = await send(
        context, "POST", definition.url, headers=headers, body=body, timeout_seconds=context.timeout_seconds
    )
    if not 200 <= answer.status < 300:
        raise tool_error(
            f"{definition.name} answered with HTTP status {answer.status}{_reason(definition, answer.body)}"
        )
    if is_too_long(answer):
        raise tool_error(f"{definition.name} answered with more than {settings.TOOL_ANSWER_MAX_BYTES} bytes.")
    if answer.truncated:
        raise tool_error(f"The connection broke during the answer of {definition.name}.")
    if image := image_of(answer.body, answer.headers.get("Content-Type", "")):
        return ToolResult("", images=(image,))
    return await context.threads.compute(context.user_id, len(answer.body), _result, definition, answer)


def _signature(definition: ToolDefinition, call_id: str, body: bytes) -> dict[str, str]:
    """The headers of the Standard Webhooks specification, if the tool has a signing secret."""
    if not definition.signing_secret:
        return {}
    timestamp = str(int(clock.now().timestamp()))
    signature = standard_signature(definition.signing_secret, call_id, timestamp, body)
    return {"webhook-id": call_id, "webhook-timestamp": timestamp, "webhook-signature": signature}


def _reason(definition: ToolDefinition, body: bytes) -> str:
    """The end of the sentence about a status: the beginning of the body, which often says why."""
    # Longer than any secret, which must not be cut before it is found.
    text = body[:REASON_BYTES].decode(errors="replace").strip()
    text = definition.without_secrets(text)[:REASON_CHARS]
    return f": {text}" if text else "."


def _result(definition: ToolDefinition, answered: Answer) -> ToolResult:
    body = answered.body
    if has_more_values(body, VALUES_MAX):
        raise tool_error(f"{definition.name} answered with more than {VALUES_MAX} values.")
    try:
        # Lenient where our own API is strict: a result of others may hold wide numbers and text that is cleaned later.
        answer = json.loads(body, parse_float=Decimal, parse_constant=_refuse_constant)
    except (ValueError, ArithmeticError, RecursionError):
        return ToolResult(_text(answered))
    if not isinstance(answer, dict) or "result" not in answer:
        return ToolResult(result_text(definition, answer))
    return ToolResult(
        result_text(definition, answer["result"]),
        _urls(definition, answer.get("resultUrls")),
        _credit_used(definition, answer.get("creditUsed")),
    )


def _text(answer: Answer) -> str:
    try:
        return answer.body.decode()
    except UnicodeDecodeError:
        kind, _, charset = answer.headers.get("Content-Type", "").partition("charset=")
    try:
        return answer.body.decode(charset.strip('" ') or "ascii")
    except (LookupError, ValueError):
        return f"[{shorten(kind.strip(' ;'), 100) or 'bytes'}, which is not text]"


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _urls(definition: ToolDefinition, urls: Any) -> tuple[str, ...]:
    if urls is None:
        return ()
    if not isinstance(urls, list) or not all(isinstance(url, str) for url in urls):
        raise tool_error(f"{definition.name} answered with resultUrls that are not an array of strings.")
    return tuple(urls)


def _credit_used(definition: ToolDefinition, credits: Any) -> int | None:
    """Micro-credits, rounded half up, at most the price: the caller agreed to no more."""
    if credits is None:
        return None
    if isinstance(credits, bool) or not isinstance(credits, (int, Decimal)) or credits < 0:
        raise tool_error(f"{definition.name} answered with a creditUsed that is not an amount.")
    # Compared before the multiplication: 1e999999 must not become an integer.
    if credits >= Decimal(definition.price) / MICRO:
        return definition.price
    return int((Decimal(credits) * MICRO).to_integral_value(ROUND_HALF_UP))
