"""Why a provider refused a request or stopped an answer, by the answer's status and body; and which model is asked
after that, and when.
"""

import contextlib
import json
import random
import re
from collections.abc import Collection, Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import Any

from django.conf import settings

from config.kernel import clock
from runs.errors import FailureReason
from runs.llm.base import ModelError
from runs.tools.base import clean_text, shorten, without_secrets

# Longest wait after a model's first failed request, in seconds; it doubles with each further one.
MODEL_RETRY_SECONDS = 0.5
MODEL_RETRY_AFTER_MAX_SECONDS = 60  # longest wait between two requests, also if the provider asks for more
DETAIL_MAX_CHARS = 300
# The characters of a provider's message that are searched: an error event can be as long as other events.
MESSAGE_MAX_CHARS = 16 * 1024
LOCATION_MAX_PARTS = 10
BY_STATUS = {
    401: FailureReason.PROVIDER_UNAUTHORIZED,
    402: FailureReason.PROVIDER_QUOTA_EXCEEDED,
    403: FailureReason.PROVIDER_UNAUTHORIZED,
    404: FailureReason.MODEL_UNKNOWN,
    413: FailureReason.CONTEXT_TOO_LONG,
    429: FailureReason.PROVIDER_RATE_LIMITED,
    **dict.fromkeys((408, 409, 425), FailureReason.PROVIDER_UNAVAILABLE),
}
# Words of servers, in lower case, about a request that has more tokens than the model's window.
TOO_LONG = (
    *("context_length_exceeded", "maximum context length", "context window"),  # OpenAI and many others
    *("exceed_context_size", "available context size", "context size has been exceeded"),  # llama.cpp
    *("prompt is too long", "exceed context limit", "model_context_window_exceeded"),  # Anthropic
    *("contextwindowexceeded", "exceeds the context"),  # LiteLLM
    *("exceeded max context", "longer than the model's context"),  # Ollama, SGLang
    *("greater than the context length", "context length of only"),  # LM Studio
    "exceeds the maximum number of tokens",  # Gemini
    "maximum prompt length",  # xAI
    "exceeded model token limit",  # Moonshot
    "prompt exceeds max length",  # Z.ai
    "range of input length",  # Alibaba
    "too many tokens",  # Cohere
    "reduce the length of the messages",
    "input is too long",  # Bedrock
    "`inputs` tokens",  # text-generation-inference
    "max_tokens must be at least 1",  # vLLM, when the input fills the window
)
FILTERED = (
    *("content_filter", "content filter", "content_policy", "content management policy", "usage polic"),
    *("responsibleaipolicyviolation", "policy_violation", "bio_policy", "was flagged"),
)
# Words of servers about an unknown model, with another status than 404.
UNKNOWN_MODEL = (
    *("model_not_found", "invalid model name", "not a valid model"),  # OpenAI and Groq, LiteLLM, OpenRouter
    *("model not exist", "invalid model:", "model identifier is invalid"),  # DeepSeek, Mistral, Bedrock
)
# Not only "billing": a message can name a tool of the caller.
NO_QUOTA = (
    *("insufficient_quota", "credit balance", "insufficient balance", "insufficient credits"),
    *("billing_error", "billing_not_active", "billing_hard_limit", "billing hard limit"),
    *("billing details", "enable billing", "billing to be enabled"),
)
# Parts of the types and codes of errors within a stream.
BY_TYPE = (
    ("rate_limit", FailureReason.PROVIDER_RATE_LIMITED),
    ("authentication", FailureReason.PROVIDER_UNAUTHORIZED),
    ("permission", FailureReason.PROVIDER_UNAUTHORIZED),
    ("not_found", FailureReason.MODEL_UNKNOWN),
    ("invalid", FailureReason.REQUEST_REFUSED),
)
# A key in a known format, a key with stars in its middle, or the password in an address.
KEY_LIKE = re.compile(
    r"(?<![\w.\-])(?:[\w.\-]*+\*{3,}[\w*.\-]*|(?:g?sk|pk|xai|key)[-_][\w.\-]{6,})|Bearer \S+|//[^/\s@]*@"
)


def refused(status: int, body: bytes, headers: Mapping[str, str], secrets: Collection[str]) -> ModelError:
    """The error for an answer whose status is not 200."""
    document: Any = None
    # Some servers send the error as the first event of a stream.
    event = next((line[5:] for line in body.splitlines() if line.startswith(b"data:")), body)
    with contextlib.suppress(ValueError, RecursionError):
        document = json.loads(event)
    return _refused(status, document, headers, secrets)


def _refused(status: int, document: Any, headers: Mapping[str, str], secrets: Collection[str]) -> ModelError:
    text, reason = _text_of(document)[:MESSAGE_MAX_CHARS], FailureReason.NOT_A_STREAM
    if status >= 400:
        other = FailureReason.PROVIDER_UNAVAILABLE if status >= 500 else FailureReason.REQUEST_REFUSED
        reason = _by_text(document, text, status) or BY_STATUS.get(status, other)
    return ModelError(reason, detail=redacted(text, secrets), status=status, retry_after=retry_after(headers))


def stopped(document: Any, secrets: Collection[str]) -> ModelError:
    """The error for an error event within a stream, or for a document with an error."""
    code, kind = _words(document)
    if re.fullmatch("[45][0-9][0-9]", code):
        return _refused(int(code), document, {}, secrets)
    kind = f"{kind} {code}".lower()
    reason = next((reason for part, reason in BY_TYPE if part in kind), FailureReason.PROVIDER_UNAVAILABLE)
    text = _text_of(document)[:MESSAGE_MAX_CHARS]
    return ModelError(_by_text(document, text) or reason, detail=redacted(text, secrets))


def _words(document: Any) -> list[str]:
    """The error's code and type."""
    if isinstance(document, list) and document:
        document = document[0]  # Gemini
    if not isinstance(document, dict):
        return ["", ""]
    error = document.get("error")
    fields = error if isinstance(error, dict) else document
    return [str(word)[:100] if isinstance(word, str | int) else "" for word in (fields.get("code"), fields.get("type"))]


def _by_text(document: Any, text: str, status: int = 400) -> FailureReason | None:
    """The reason by the error's words, or None. Words of a rate limit (429) about sizes do not count."""
    words = " ".join([text, *_words(document)]).lower()
    if status < 500 and any(sign in words for sign in NO_QUOTA):
        return FailureReason.PROVIDER_QUOTA_EXCEEDED
    if status == 429:
        return None
    if any(sign in words for sign in TOO_LONG):
        return FailureReason.CONTEXT_TOO_LONG
    if status < 500 and any(sign in words for sign in UNKNOWN_MODEL):
        return FailureReason.MODEL_UNKNOWN
    return FailureReason.CONTENT_FILTERED if any(sign in words for sign in FILTERED) else None


def _text_of(value: Any, depth: int = 0) -> str:
    """The provider's message: a text, or that in the first item or in a known field, which can be nested."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and depth < 6:
        return _text_of(value[0], depth + 1)
    if not isinstance(value, dict) or depth >= 6:
        return ""
    found = (value.get(name) for name in ("error", "message", "detail", "msg", "errors"))
    text = next((text for part in found if part and (text := _text_of(part, depth + 1))), "")
    if isinstance(value.get("loc"), list):
        text = f"{'.'.join(map(str, value['loc'][:LOCATION_MAX_PARTS]))}: {text}"
    metadata = value.get("metadata")
    if isinstance(metadata, dict) and isinstance(metadata.get("raw"), str):
        text = f"{text}: {metadata['raw']}"  # OpenRouter, which quotes the server behind it
    return text


def redacted(text: str, secrets: Collection[str]) -> str:
    """``text`` for staff: short and without anything like a key. Some providers quote the key."""
    text = without_secrets(clean_text(text), secrets)
    return shorten(KEY_LIKE.sub("[key]", text).strip(), DETAIL_MAX_CHARS)


def retry_after(headers: Mapping[str, str]) -> float | None:
    """The seconds that the provider asks to wait: ``retry-after-ms``, or ``Retry-After`` as seconds or as a date."""
    for name, unit in (("retry-after-ms", 1000.0), ("Retry-After", 1.0)):
        text = headers.get(name, "").strip()
        if re.fullmatch(r"[0-9]{1,18}(\.[0-9]{1,9})?", text):
            return float(text) / unit
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        return max(0.0, (parsedate_to_datetime(headers.get("Retry-After", "")) - clock.now()).total_seconds())
    return None


def next_model(error: ModelError, asked: Sequence[str], chain: Sequence[str], seconds_left: float) -> tuple[str, float]:
    """The model that is asked after a failed request, and in how many seconds; an empty name if none is. ``asked``: the
    models of the turn's failed requests, the last one included. ``chain``: the models that the run may ask, in order.
    ``seconds_left``: the run's remaining time. A wait ends before it does.
    """
    model = asked[-1]
    tries = asked.count(model)
    may_ask_again = error.reason.retried or error.status == 429
    if may_ask_again and tries < settings.MODEL_ATTEMPTS:
        # As long as the provider asked for; otherwise a backoff with full jitter.
        longest = min(MODEL_RETRY_SECONDS * 2 ** (tries - 1), MODEL_RETRY_AFTER_MAX_SECONDS)
        delay = random.uniform(0.0, longest) if error.retry_after is None else error.retry_after  # noqa: S311
        delay = min(delay, MODEL_RETRY_AFTER_MAX_SECONDS)
        if delay < seconds_left:
            return model, delay
    others = [name for name in chain if name not in asked] if seconds_left > 0 else []
    return next(iter(others), ""), 0.0
