"""The built-in tool ``web_fetch``: the text of a public web page. Regular expressions read each character at most
twice; the time of ``html.parser`` grows with the square of some inputs.
"""

import html
import re
from contextlib import suppress
from typing import Any
from urllib.parse import urljoin

from django.conf import settings

from config.kernel.money import MICRO
from config.outbound.client import Answer
from runs.tools import base
from runs.tools.base import BuiltinTool, ToolContext, ToolDefinition, ToolResult, input_object, tool_error
from runs.tools.http import CHARSET, is_too_long, require_plain, send

REDIRECTS_MAX = 5
REDIRECT_STATUSES = frozenset({301, 302, 303, 307, 308})
PAGES = frozenset({"text/html", "application/xhtml+xml"})
TEXTS = frozenset({"application/json", "application/xml", "application/javascript", "application/x-ndjson"})
HEADERS = {"Accept": "text/html, text/*;q=0.9, application/json;q=0.8, */*;q=0.1"}
CHARSET_SEARCHED_BYTES = 2048

# Each character reference costs a call in Python. In a page with more, they are not replaced.
REFERENCES_MAX = 100_000
# Elements whose content is not text of the page.
_SILENT = "script|style|template|noscript|svg|iframe|object|canvas|textarea|select"
_BLOCK_NAMES = (
    "address article aside blockquote body br caption dd div dl dt fieldset figcaption figure footer form "
    "h1 h2 h3 h4 h5 h6 head header hr li main nav ol p pre section table tbody td tfoot th thead title tr ul"
)
_BLOCKS = frozenset(_BLOCK_NAMES.split())
# What is not text: a comment, a declaration, a silent element up to its end tag, and any other tag. Markup without an
# end reaches to the end of the page, so no part of the page is read more than twice.
_MARKUP = re.compile(
    # The character after "<" is checked first: a page of only "<" would hold the interpreter for half a second.
    r"<(?=[!?a-z]|/[a-z])(?:!--.*?(?:-->|\Z)|[!?][^>]*>?"
    rf"|({_SILENT})(?![a-z0-9])[^>]*(?<!/)>.*?(?=</\1(?![a-z0-9])|\Z)"
    r"|/?([a-z][a-z0-9]*)[^>]*>?)",
    re.IGNORECASE | re.DOTALL,
)
_EMPTY_LINES = re.compile(r"\n{3,}")


async def web_fetch(definition: ToolDefinition, input: dict[str, Any], context: ToolContext) -> ToolResult:
    url = input["url"]
    for _ in range(REDIRECTS_MAX + 1):
        url = url.partition("#")[0]
        answer = await send(context.user_id, url, headers=HEADERS, seconds=context.timeout_seconds)
        location = answer.headers.get("location", "")
        if answer.status not in REDIRECT_STATUSES or not location:
            return ToolResult(await context.threads.compute(context.user_id, len(answer.body), _text, answer))
        try:
            url = urljoin(url, location)
        except ValueError:
            raise tool_error("The page redirects to something that is not an address.") from None
    raise tool_error(f"The page redirects more than {REDIRECTS_MAX} times.")


def _text(answer: Answer) -> str:
    if not 200 <= answer.status < 300:
        raise tool_error(f"The server answered with HTTP status {answer.status}.")
    require_plain(answer)
    header = answer.headers.get("content-type") or "text/plain"
    kind = header.partition(";")[0].strip().lower()
    if not (kind in PAGES or kind in TEXTS or kind.startswith("text/") or kind.endswith(("+json", "+xml"))):
        raise tool_error(f"The content type is {kind[:100]}, which is not text.")
    text = decode(answer.body, header)
    if kind in PAGES:
        text = page_text(text)
    if is_too_long(answer):
        text += f"\n[Truncated: only the first {settings.TOOL_ANSWER_MAX_BYTES} bytes were read.]"
    elif answer.truncated:
        text += "\n[Incomplete: the connection broke here.]"
    return text or "The page has no text."


def decode(content: bytes, header: str) -> str:
    """Bytes as text, by the charset of the header, else of the page, else UTF-8. Invalid bytes are replaced."""
    named = CHARSET.search(header) or CHARSET.search(content[:CHARSET_SEARCHED_BYTES].decode("latin-1"))
    try:
        return content.decode(named[1] if named else "utf-8", "replace")
    except (LookupError, UnicodeError):
        return content.decode("utf-8", "replace")


def page_text(page: str) -> str:
    """The readable text of an HTML page, with at most one blank between words and one empty line between lines."""
    text = _MARKUP.sub(lambda markup: "\n" if (markup[2] or "").lower() in _BLOCKS else "", page)
    if text.count("&") <= REFERENCES_MAX:
        with suppress(ValueError):  # Python refuses a character reference with thousands of digits.
            text = html.unescape(text)
    lines = "\n".join(" ".join(line.split()) for line in text.splitlines())
    return _EMPTY_LINES.sub("\n\n", lines).strip()


TOOL = BuiltinTool(
    name="web_fetch",
    display_name="Fetch a web page",
    description="Reads a public web page or text file and returns its text.",
    input_schema=input_object(url=base.text_input(base.URL_MAX_CHARS, "The absolute http(s) address.")),
    price=1 * MICRO,
    execute=web_fetch,
)
