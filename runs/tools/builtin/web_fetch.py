"""The built-in tool ``web_fetch``: the text of a public page."""

from __future__ import annotations

import time
from email.message import Message
from urllib.parse import urldefrag, urljoin

from django.conf import settings

from runs.tools import outbound
from runs.tools.base import TOOL_ERROR, ToolFailure
from runs.tools.builtin.webpage import decode, page_text

REDIRECTS_MAX = 5
REDIRECT_STATUSES = frozenset({301, 302, 303, 307, 308})
PAGES = frozenset({"text/html", "application/xhtml+xml"})
TEXTS = frozenset({"application/json", "application/xml", "application/javascript", "application/x-ndjson"})
HEADERS = {"Accept": "text/html, text/*;q=0.9, application/json;q=0.8, */*;q=0.1"}


def fetch_text(url: str, timeout_seconds: float) -> str:
    """The page's text, redirects followed. Blocking; raises ToolFailure. Each hop's address is checked anew."""
    deadline = time.monotonic() + timeout_seconds
    for _ in range(REDIRECTS_MAX + 1):
        answer = outbound.send("GET", urldefrag(url).url, headers=HEADERS, timeout_seconds=deadline - time.monotonic())
        location = answer.headers.get("location", "")
        if answer.status not in REDIRECT_STATUSES or not location:
            return _readable(answer)
        url = _target(url, location)
    raise ToolFailure(TOOL_ERROR, f"The page redirects more than {REDIRECTS_MAX} times.")


def _target(url: str, location: str) -> str:
    try:
        return urljoin(url, location)
    except ValueError:
        raise ToolFailure(TOOL_ERROR, "The page redirects to something that is no address.") from None


def _readable(answer: outbound.Answer) -> str:
    if not 200 <= answer.status < 300:
        raise ToolFailure(TOOL_ERROR, f"The server answered with HTTP status {answer.status}.")
    if answer.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise ToolFailure(TOOL_ERROR, "The server sent a compressed page although it was asked not to.")
    header = Message()
    header["Content-Type"] = answer.headers.get("content-type", "text/plain")
    kind = header.get_content_type()
    if not (kind in PAGES or kind in TEXTS or kind.startswith("text/") or kind.endswith(("+json", "+xml"))):
        raise ToolFailure(TOOL_ERROR, f"The address holds {kind[:100]}, which can't be read as text.")
    charset = header.get_param("charset")
    text = decode(answer.body, charset if isinstance(charset, str) else None)
    if kind in PAGES:
        text = page_text(text)
    if outbound.was_cut(answer):
        text += f"\n[Cut: only the first {settings.TOOL_ANSWER_MAX_BYTES} bytes were read.]"
    elif answer.truncated:
        text += "\n[The page broke off here.]"
    return text or "The page has no text."
