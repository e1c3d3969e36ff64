"""HTTP requests of tools, and the tool type ``http``: an endpoint that staff add to the catalogue, and the callbacks in
which it gives the outcome of a parked call. docs/tools.md has what a call sends and what its answers mean.
"""

import contextlib
import hmac
import json
import re
from collections.abc import Mapping
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

from django.conf import settings
from django.core.signing import BadSignature, Signer

from config.kernel import clock
from config.kernel.errors import ValidationFailed
from config.kernel.jsontext import MalformedJSON, dumps, parse_value
from config.kernel.money import MICRO
from config.outbound import client
from config.outbound.client import Answer
from config.outbound.loop import shared
from runs.errors import CallError
from runs.tools import base
from runs.tools.base import Parked, ToolContext, ToolDefinition, ToolFailure, ToolResult, tool_error
from runs.tools.files import image_of
from webhooks.signing import TOLERANCE_SECONDS, standard_signature

# The path of a callback's address. The call's id follows with an HMAC by SECRET_KEY (SECRET_KEY_FALLBACKS verify, too).
# Knowing the address is enough to send the outcome, so it is not stored, and no log, message or export has it.
CALLBACK_PATH = "/api/callbacks/"
ERROR_MAX_CHARS = 1000  # of an error in a callback
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
    user_id: int, url: str, *, headers: dict[str, str], seconds: float, body: bytes | None = None, reuse: bool = False
) -> Answer:
    """The answer to a GET, or a POST of ``body``: of any status, cut at TOOL_ANSWER_MAX_BYTES. Raises ToolFailure."""
    request = client.asend(
        "GET" if body is None else "POST",
        url,
        headers={"User-Agent": USER_AGENT, **headers},
        body=body,
        total_timeout=seconds,
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
    kinds = {"Content-Type": "application/json", "Accept": "application/json, image/*;q=0.5"}
    headers = {**definition.secret_headers, **kinds, "Idempotency-Key": name}
    if definition.signing_secret:  # by the Standard Webhooks specification
        timestamp = str(int(clock.now().timestamp()))
        signature = standard_signature(definition.signing_secret, name, timestamp, body)
        headers |= {"webhook-id": name, "webhook-timestamp": timestamp, "webhook-signature": signature}
    return await send(context.user_id, url, headers=headers, body=body, seconds=seconds)


def _parked(body: bytes) -> Parked:
    """The content of an answer with status 202, if it is one that we know: many servers send a body of their own."""
    try:
        answer = json.loads(body[:REASON_BYTES])  # this runs on the event loop, so a long answer is not read
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
    answer = _value(answered.body, answered.headers.get("Content-Type", ""))
    return read_result(definition.name, definition.price, answer)


def read_result(name: str, price: int, answer: Any) -> ToolResult:
    """``{result, resultUrls?, creditUsed?}``, or any other result; for at most ``price``. Raises ToolFailure."""
    if not isinstance(answer, dict) or "result" not in answer:
        answer = {"result": answer}
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


def callback_url(call_id: str, *, signed: bool = False) -> str:
    """The callback address of a call. ``signed``: the tool must sign what it sends there."""
    return f"{settings.BASE_URL}{CALLBACK_PATH}{_signer(signed).sign(call_id)}"


def call_of(token: str) -> tuple[str | None, bool]:
    """The id of the call that the token names, None if the token is not ours; and whether the tool must sign."""
    for signed in (False, True) if token.isascii() else ():
        with contextlib.suppress(BadSignature):
            return _signer(signed).unsign(token), signed
    return None, False


def _signer(signed: bool) -> Signer:
    return Signer(sep=".", salt="runs.callbacks.signed" if signed else "runs.callbacks")


def is_signed(headers: Mapping[str, str], body: bytes, secret: str, now: float) -> bool:
    """Whether a callback is signed with this secret as in the Standard Webhooks specification, and is not too old."""
    name, timestamp = headers.get("webhook-id", ""), headers.get("webhook-timestamp", "")
    given = headers.get("webhook-signature", "")
    if not re.fullmatch(r"[0-9]{1,12}", timestamp) or abs(now - int(timestamp)) > TOLERANCE_SECONDS:
        return False
    expected = standard_signature(secret, name, timestamp, body).encode()
    return any(hmac.compare_digest(one.encode(), expected) for one in given.split(" "))


def read_callback(body: bytes, content_type: str, *, name: str, price: int) -> ToolResult | ToolFailure | Parked:
    """The outcome or progress of a call of ``name``, of at most ``price`` micro-credits. Raises ValidationFailed."""
    value = _value(body, content_type, is_strict=True)
    kinds = [kind for kind in ("result", "error", "progress") if kind in value] if isinstance(value, dict) else []
    if len(kinds) > 1:
        raise ValidationFailed({kinds[1]: [f"Send {kinds[0]} or {kinds[1]}, not both."]})
    if kinds == ["error"]:
        error = value["error"]
        if not isinstance(error, str) or not 0 < len(error) <= ERROR_MAX_CHARS:
            raise ValidationFailed({"error": [f"A text of 1 to {ERROR_MAX_CHARS} characters is required."]})
        return tool_error(without_tokens(error))
    if kinds == ["progress"]:
        return _progress(value["progress"])
    try:
        return base.clean_result(read_result(name, price, value))
    except ToolFailure as failure:
        raise ValidationFailed({"result": [failure.message]}) from None


def _value(body: bytes, content_type: str, *, is_strict: bool = False) -> Any:
    """The JSON value of the body, or else its text; if ``is_strict``, only of a body that does not claim to be JSON."""
    kind = content_type.partition(";")[0].strip().lower()
    try:
        return parse_value(body, values=VALUES_MAX, any_text=True)
    except MalformedJSON as error:
        if is_strict and not kind.startswith("text/") and (kind.endswith("json") or body.lstrip()[:1] in b'{["'):
            raise ValidationFailed({"body": [error.message]}) from None
        return decoded(body, content_type)


def _progress(given: Any) -> Parked:
    if not isinstance(given, dict):
        raise ValidationFailed({"progress": ["An object with fraction or message is required."]})
    fraction, message = given.get("fraction"), given.get("message")
    if fraction is not None and not (type(fraction) in (int, Decimal) and 0 <= fraction <= 1):
        raise ValidationFailed({"progress.fraction": ["A number from 0 to 1 is required."]})
    if message is not None and not (isinstance(message, str) and len(message) <= base.PROGRESS_MAX_CHARS):
        wanted = f"At most {base.PROGRESS_MAX_CHARS} characters of text are allowed."
        raise ValidationFailed({"progress.message": [wanted]})
    return Parked(without_tokens(message or ""), None if fraction is None else float(fraction))
