"""Text and JSON of providers, made valid for every database and JSON reader. ``runs.llm.http.TurnReader`` cleans all
that it passes on with these functions, after it has put the parts of a stream together.
"""

from __future__ import annotations

import math
import re
from typing import Any

from runs.tools.base import clean_text

LONE_SURROGATE = re.compile("[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]")
# Of an item of reasoning. Known ones have four levels.
DEPTH_MAX = 32


def join_surrogates(text: str) -> str:
    """The text with each surrogate pair as one character, and without NUL and lone surrogates."""
    if text.isascii():
        return text.replace("\x00", "")
    # Not by the codec's error handler, which is slow.
    text = LONE_SURROGATE.sub("\ufffd", text)
    return clean_text(text.encode("utf-16-le", "surrogatepass").decode("utf-16-le"))


def clean_json(value: Any, depth: int = 0) -> Any:
    """The value with each of its texts cleaned. Raises ValueError if it is too deep or holds a number that is not
    finite.
    """
    if depth > DEPTH_MAX or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError
    if isinstance(value, str):
        return join_surrogates(value)
    if isinstance(value, dict):
        return {join_surrogates(name): clean_json(part, depth + 1) for name, part in value.items()}
    if isinstance(value, list):
        return [clean_json(part, depth + 1) for part in value]
    return value
