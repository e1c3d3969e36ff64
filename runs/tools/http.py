"""HTTP requests of tools, and the tool type ``http``: an endpoint that staff add to the catalogue.

docs/tools.md has what a call sends and what its answers mean.
"""

import contextlib
import json
import re
from collections.abc import Mapping
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

from django.conf import settings

from config.kernel import clock
from config.kernel.jsontext import MalformedJSON, dumps, parse_value
from config.kernel.money import MICRO
from config.outbound import client
from config.outbound.client import Answer
from config.outbound.loop import shared
from runs.errors import CallError
from runs.tools import base
from runs.tools.base import Parked, ToolContext, ToolDefinition, ToolFailure, ToolResult, tool_error
from runs.tools.files import image_of
from webhooks.signing import standard_signature

USER_AGENT = "agent-workflow-service"
# The most JSON values of an answer: far more than a model can read. An answer with more is treated as text.
VALUES_MAX = 100_000
# The part of an error answer's body that is shown, and the part that is searched.
REASON_CHARS = 300
REASON_BYTES = 32 * 1024
CALLBACK_TOKEN = re.compile(r"inv_[A-Za-z0-9]{1,60}\.[A-Za-z0-9_-]{43}")
# The charset in a header or in a page. Only codecs that decode in linear time; others are ignored.
CHARSET = re.compile(
    r"charset=[\"']?((?:utf-?(?:8|16|32)|us-ascii|latin-?1|iso-?8859-|windows-125|cp125|koi8-[ru]|gbk|gb2312|gb18030"
    r"|big5|shift[_-]?jis|euc-(?:jp|kr))[0-9bel]{0,2})(?![\w-])",
    re.IGNORECASE,
)


async def send(
    user_id: int,
    method: str,
    url: str,
    *,
    headers: Mapping[str, str],
    body: bytes | None = None,
    timeout_seconds: float,
    reuse: bool = False,
) -> Answer:
    """The answer, of any status, with at most ``TOOL_ANSWER_MAX_BYTES`` of its body. ``reuse``: use a connection that
    can be used again. Raises ToolFailure.
    """
    request = client.asend(
        method,
        url,
        headers={"User-Agent": USER_AGENT, **headers},
        body=body,
        connect_timeout=settings.OUTBOUND_CONNECT_TIMEOUT_SECONDS,
        total_timeout=timeout_seconds,
        max_bytes=settings.TOOL_ANSWER_MAX_BYTES,
        allow_private=settings.OUTBOUND_ALLOW_PRIVATE,
        reuse=reuse,
        owner=str(user_id),
    )
    try:
        return await shared.run(request)
    except client.RequestTimedOut as error:
        raise ToolFailure(CallError.TOOL_TIMEOUT, str(error)) from None
    except (client.AddressRefused, client.RequestFailed, ValueError) as error:
        raise tool_error(str(error)) from None


def is_too_long(answer: Answer) -> bool:
    """Whether the body was cut at the limit, and not by a broken connection."""
    return answer.truncated and len(answer.body) >= settings.TOOL_ANSWER_MAX_BYTES


def require_plain(answer: Answer) -> None:
    """Raises ToolFailure for a compressed body."""
    if answer.headers.get("Content-Encoding", "identity").strip().lower() not in ("", "identity"):
        raise tool_error("The server sent a compressed answer, although the request does not accept one.")


async def execute(definition: ToolDefinition, input: dict[str, Any], context: ToolContext) -> ToolResult | Parked:
    """Post the call. Raises ToolFailure unless the answer is 2xx, complete and within the limits."""
    told: dict[str, Any] = {"input": input}
    if context.park_until is not None:
        told["callback"] = {"url": context.callback_url, "expiresAt": clock.iso(context.park_until)}
    answer = await _post(definition, definition.url, context, context.invocation_id, told, context.timeout_seconds)
    if answer.status == 202 and context.park_until is not None:
        return _parked(answer.body)
    if not 200 <= answer.status < 300:
        reason = _reason(definition, answer.body)
        raise tool_error(f"{definition.name} answered with HTTP status {answer.status}{reason}")
    if is_too_long(answer):
        raise tool_error(f"{definition.name} answered with more than {settings.TOOL_ANSWER_MAX_BYTES} bytes.")
    if answer.truncated:
        raise tool_error(f"The connection broke during the answer of {definition.name}.")
    require_plain(answer)
    if image := image_of(answer.body, answer.headers.get("Content-Type", "")):
        return ToolResult("", images=(image,))
    return await context.threads.compute(context.user_id, len(answer.body), _result, definition, answer)


async def tell_end(definition: ToolDefinition, context: ToolContext) -> None:
    """Post the end of a call whose outcome is no longer wanted to the tool's ``cancel_url``. Raises ToolFailure."""
    if not definition.cancel_url or not context.end_reason:
        return
    # Not the key of the call's own request: a receiver may ignore a key that it has seen.
    name, seconds = f"{context.invocation_id}-end", settings.WEBHOOK_ATTEMPT_TIMEOUT_SECONDS
    answer = await _post(definition, definition.cancel_url, context, name, {"reason": context.end_reason}, seconds)
    if not 200 <= answer.status < 300:
        raise tool_error(f"HTTP status {answer.status}.")


async def _post(
    definition: ToolDefinition, url: str, context: ToolContext, name: str, told: dict[str, Any], seconds: float
) -> Answer:
    """Post ``told`` with the ids of the call. ``name`` identifies the request."""
    ids = {"invocationId": context.invocation_id, "runId": context.run_id, "chatId": context.chat_id}
    body = dumps(ids | {"userId": context.user_name} | told)
    headers = {
        **definition.secret_headers,
        "Content-Type": "application/json",
        "Accept": "application/json, image/*;q=0.5",
        "Idempotency-Key": name,
    }
    if definition.signing_secret:  # by the Standard Webhooks specification
        timestamp = str(int(clock.now().timestamp()))
        signature = standard_signature(definition.signing_secret, name, timestamp, body)
        headers |= {"webhook-id": name, "webhook-timestamp": timestamp, "webhook-signature": signature}
    return await send(context.user_id, "POST", url, headers=headers, body=body, timeout_seconds=seconds)


def _parked(body: bytes) -> Parked:
    """The content of an answer with status 202, if it is one that we know: many servers send a body of their own."""
    try:
        # This runs on the event loop, so a long answer is not read.
        answer = json.loads(body[:REASON_BYTES])
    except (ValueError, RecursionError):
        return Parked()
    answer = answer if isinstance(answer, dict) else {}
    message, seconds = answer.get("message"), answer.get("expiresInSeconds", 0)
    if type(seconds) not in (int, float) or not 1 <= seconds <= base.PARK_SECONDS[-1]:
        seconds = None
    return Parked(without_tokens(message) if isinstance(message, str) else "", expires_in_seconds=seconds)


def without_tokens(text: str) -> str:
    """The text without the tokens of callbacks, which a tool may send back."""
    return CALLBACK_TOKEN.sub("[callback]", text)


def _reason(definition: ToolDefinition, body: bytes) -> str:
    """The end of a sentence about a status: the beginning of the body, which often says the cause."""
    # More is searched than is shown: a secret must not be cut before it is found.
    text = body[:REASON_BYTES].decode(errors="replace").strip()
    text = without_tokens(definition.without_secrets(text))[:REASON_CHARS]
    return f": {text}" if text else "."


def _result(definition: ToolDefinition, answered: Answer) -> ToolResult:
    try:
        answer = parse_value(answered.body, values=VALUES_MAX, any_text=True)
    except MalformedJSON:
        answer = decoded(answered.body, answered.headers.get("Content-Type", ""))
    if not isinstance(answer, dict) or "result" not in answer:
        answer = {"result": answer}
    return read_result(definition.name, definition.price, answer)


def read_result(name: str, price: int, answer: Mapping[str, Any]) -> ToolResult:
    """``{result, resultUrls?, creditUsed?}`` of a tool whose calls cost at most ``price``. Raises ToolFailure."""
    urls, credits, used = answer.get("resultUrls") or [], answer.get("creditUsed"), None
    if not isinstance(urls, list) or not all(isinstance(url, str) for url in urls):
        raise tool_error(f"{name} answered with resultUrls that are not an array of strings.")
    if credits is not None:
        if type(credits) not in (int, Decimal) or credits < 0:
            raise tool_error(f"{name} answered with a creditUsed that is not an amount.")
        # The caller agreed to no more than the price.
        used = min(price, int((Decimal(credits) * MICRO).to_integral_value(ROUND_HALF_UP)))
    text = without_tokens(base.result_text(name, answer["result"]))
    return ToolResult(text, tuple(map(without_tokens, urls)), used)


def decoded(body: bytes, content_type: str) -> str:
    """A body that is not JSON as text."""
    kind, named = content_type.partition("charset=")[0], CHARSET.search(content_type)
    for codec in ("utf-8", named[1] if named else "ascii"):
        with contextlib.suppress(LookupError, ValueError):
            return body.decode(codec)
    return f"[{base.shorten(kind.strip(' ;'), 100) or 'bytes'}, which is not text]"
