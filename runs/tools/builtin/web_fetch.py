"""The built-in tool ``web_fetch``: the text of a public web page.

Regular expressions replace ``html.parser``: they read each character once or twice whatever the page holds, while the
time of the standard parser grows with the square of some inputs.
"""

from __future__ import annotations

import html
import re
import time
from contextlib import suppress
from email.message import Message
from typing import Any
from urllib.parse import urldefrag, urljoin

from django.conf import settings

from config.kernel.money import MICRO
from config.outbound.client import Answer
from runs.tools.base import (
    URL_MAX_CHARS,
    BuiltinTool,
    ToolContext,
    ToolDefinition,
    ToolResult,
    input_object,
    tool_error,
)
from runs.tools.http import is_too_long, send

REDIRECTS_MAX = 5
REDIRECT_STATUSES = frozenset({301, 302, 303, 307, 308})
PAGES = frozenset({"text/html", "application/xhtml+xml"})
TEXTS = frozenset({"application/json", "application/xml", "application/javascript", "application/x-ndjson"})
HEADERS = {"Accept": "text/html, text/*;q=0.9, application/json;q=0.8, */*;q=0.1"}
# Codecs that decode in linear time. A page with any other charset is read as UTF-8.
CHARSET = re.compile(
    r"(utf-?(8|16|32)([bl]e)?|us-ascii|ascii|latin-?1|iso-?8859-\d{1,2}|windows-125\d|cp125\d|koi8-[ru]|gbk|gb2312|gb18030"
    r"|big5|shift[_-]?jis|euc-(jp|kr))",
    re.IGNORECASE,
)
META_CHARSET = re.compile(rb"<meta[^>]{0,200}?charset=[\"']?([A-Za-z0-9_-]{2,20})", re.IGNORECASE)
META_SEARCHED_BYTES = 2048
# Python's parser of the header needs a time that grows with the square of its length.
CONTENT_TYPE_MAX_CHARS = 1000

# Elements whose content is not text of the page.
_SILENT = "script|style|template|noscript|svg|iframe|object|canvas|textarea|select"
_BLOCKS = frozenset(
    re.findall(
        r"\w+",
        "address article aside blockquote body br caption dd div dl dt fieldset figcaption figure footer form "
        "h1 h2 h3 h4 h5 h6 head header hr li main nav ol p pre section table tbody td tfoot th thead title tr ul",
    )
)
# What is not text: a comment, a declaration, a silent element up to its end tag, and any other tag. Markup without an
# end reaches to the end of the page, so no part of the page is read more than twice.
_MARKUP = re.compile(
    # The sign after "<" decides first: otherwise a page of "<" alone holds the interpreter's lock for half a second.
    r"<(?=[!?a-z]|/[a-z])(?:!--.*?(?:-->|\Z)|[!?][^>]*>?"
    rf"|({_SILENT})(?![a-z0-9])[^>]*(?<!/)>.*?(?=</\1(?![a-z0-9])|\Z)"
    r"|/?([a-z][a-z0-9]*)[^>]*>?)",
    re.IGNORECASE | re.DOTALL,
)
_BLANKS = re.compile(r"[^\S\n]+")


async def web_fetch(definition: ToolDefinition, input: dict[str, Any], context: ToolContext) -> ToolResult:
    answer = await fetch(input["url"], context)
    return ToolResult(await context.threads.compute(context.user_id, len(answer.body), _text, answer))


async def fetch(url: str, context: ToolContext) -> Answer:
    """The answer after at most ``REDIRECTS_MAX`` redirects. The address of each is checked. Raises ToolFailure."""
    deadline = time.monotonic() + context.timeout_seconds
    for _ in range(REDIRECTS_MAX + 1):
        left = deadline - time.monotonic()
        answer = await send(context.user_id, "GET", urldefrag(url).url, headers=HEADERS, timeout_seconds=left)
        location = answer.headers.get("location", "")
        if answer.status not in REDIRECT_STATUSES or not location:
            return answer
        try:
            url = urljoin(url, location)
        except ValueError:
            raise tool_error("The page redirects to something that is not an address.") from None
    raise tool_error(f"The page redirects more than {REDIRECTS_MAX} times.")


def _text(answer: Answer) -> str:
    if not 200 <= answer.status < 300:
        raise tool_error(f"The server answered with HTTP status {answer.status}.")
    if answer.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise tool_error("The server sent a compressed page, although the request excludes compression.")
    header = Message()
    header["Content-Type"] = answer.headers.get("content-type", "text/plain")[:CONTENT_TYPE_MAX_CHARS]
    kind = header.get_content_type()
    if not (kind in PAGES or kind in TEXTS or kind.startswith("text/") or kind.endswith(("+json", "+xml"))):
        raise tool_error(f"The content type is {kind[:100]}, which is not text.")
    charset = header.get_param("charset")
    text = decode(answer.body, charset if isinstance(charset, str) else None)
    if kind in PAGES:
        text = page_text(text)
    if is_too_long(answer):
        text += f"\n[Truncated: only the first {settings.TOOL_ANSWER_MAX_BYTES} bytes were read.]"
    elif answer.truncated:
        text += "\n[Incomplete: the connection broke here.]"
    return text or "The page has no text."


def decode(content: bytes, charset: str | None) -> str:
    """Bytes as text by ``charset``, else by the page's own charset, else by UTF-8. Invalid bytes are replaced."""
    if charset is None:
        named = META_CHARSET.search(content[:META_SEARCHED_BYTES])
        charset = named.group(1).decode("ascii") if named else "utf-8"
    if not CHARSET.fullmatch(charset):
        charset = "utf-8"
    try:
        return content.decode(charset, "replace")
    except (LookupError, UnicodeError):
        return content.decode("utf-8", "replace")


def page_text(page: str) -> str:
    """The readable text of an HTML page."""
    text = _MARKUP.sub(lambda markup: "\n" if (markup[2] or "").lower() in _BLOCKS else "", page)
    with suppress(ValueError):  # Python refuses a character reference with thousands of digits.
        text = html.unescape(text)
    return tidy(text)


def tidy(text: str) -> str:
    """One blank for several, and at most one empty line between lines."""
    lines: list[str] = []
    for line in text.splitlines():
        line = _BLANKS.sub(" ", line).strip()
        if line or (lines and lines[-1]):
            lines.append(line)
    return "\n".join(lines).strip()


TOOL = BuiltinTool(
    name="web_fetch",
    display_name="Fetch a web page",
    description="Reads a public web page or text file and returns its text.",
    input_schema=input_object(
        url={
            "type": "string",
            "minLength": 1,
            "maxLength": URL_MAX_CHARS,
            "description": "The absolute http(s) address.",
        }
    ),
    price=1 * MICRO,
    execute=web_fetch,
)
