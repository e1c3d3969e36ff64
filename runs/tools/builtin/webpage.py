"""What a page says, as plain text: tags, scripts and styles taken out, blocks on lines of their own.

A scanner of our own instead of ``html.parser``: pages come from anywhere, and each character here is looked at once or
twice whatever the page holds (the standard parser takes time that grows with the square of some inputs).
"""

from __future__ import annotations

import html
import re

# Codecs that decode in linear time; a page that names any other is read as UTF-8.
CHARSET = re.compile(
    r"(utf-?(8|16|32)([bl]e)?|us-ascii|ascii|latin-?1|iso-?8859-\d{1,2}|windows-125\d|cp125\d|koi8-[ru]|gbk|gb2312|gb18030"
    r"|big5|shift[_-]?jis|euc-(jp|kr))",
    re.IGNORECASE,
)
META_CHARSET = re.compile(rb"<meta[^>]{0,200}?charset=[\"']?([A-Za-z0-9_-]{2,20})", re.IGNORECASE)
META_SEARCHED_BYTES = 2048

# Elements whose content is never text of the page.
SILENT = frozenset(
    {"script", "style", "template", "noscript", "svg", "iframe", "object", "canvas", "textarea", "select"}
)
BLOCKS = frozenset(
    re.findall(
        r"\w+",
        "address article aside blockquote body br caption dd div dl dt fieldset figcaption figure footer form "
        "h1 h2 h3 h4 h5 h6 head header hr li main nav ol p pre section table tbody td tfoot th thead title tr ul",
    )
)
_TAG = re.compile(r"<(/?)([a-zA-Z][a-zA-Z0-9]*)")
_CLOSING = {name: re.compile(rf"</{name}(?![a-z0-9])", re.IGNORECASE) for name in SILENT}
_BLANKS = re.compile(r"[^\S\n]+")


def decode(content: bytes, charset: str | None) -> str:
    """Bytes as text by the server's charset, else the page's own, else UTF-8; what does not fit is replaced."""
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
    parts: list[str] = []
    position = 0
    while (start := page.find("<", position)) != -1:
        parts.append(page[position:start])
        if page.startswith("<!--", start):
            end = page.find("-->", start + 4)
            position = len(page) if end == -1 else end + 3
            continue
        tag = _TAG.match(page, start)
        if tag is None:
            if page.startswith(("<!", "<?"), start):
                end = page.find(">", start)
                position = len(page) if end == -1 else end + 1
            else:
                parts.append("<")
                position = start + 1
            continue
        name = tag.group(2).lower()
        if name in BLOCKS:
            parts.append("\n")
        end = page.find(">", tag.end())
        if end == -1:
            position = len(page)
            break
        position = end + 1
        if name in SILENT and not tag.group(1) and page[end - 1] != "/":
            closing = _CLOSING[name].search(page, position)
            position = len(page) if closing is None else closing.start()
    parts.append(page[position:])
    return tidy(_unescape("".join(parts)))


def tidy(text: str) -> str:
    """Runs of blanks as one, and at most one empty line between lines."""
    lines: list[str] = []
    for line in text.splitlines():
        line = _BLANKS.sub(" ", line).strip()
        if line or (lines and lines[-1]):
            lines.append(line)
    return "\n".join(lines).strip()


def _unescape(text: str) -> str:
    try:
        return html.unescape(text)
    except ValueError:
        # A character reference with thousands of digits, which Python refuses to read as a number.
        return text
