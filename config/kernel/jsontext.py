"""JSON text: one strict reader and one exact writer.

The reader is bounded and exact: numbers with a fraction become Decimal, never float. It refuses what one JSON reader
takes and another does not (duplicate keys, NaN, lone surrogates) and what a database cannot store (NUL). The writer
gives compact UTF-8 with every amount digit for digit.
"""

from __future__ import annotations

import json
import re
from datetime import datetime
from decimal import Decimal
from typing import Any, NoReturn

import simplejson
from django.conf import settings
from django.utils.functional import Promise
from simplejson import RawJSON

from config.kernel import clock
from config.kernel.errors import DomainError

# The widest numbers taken: integers of a signed 64-bit column, the exponents of a double, more digits than any amount
# has.
INTEGER_MAX = 2**63
NUMBER_MAX_CHARS = 64
EXPONENT_MAX = 308

_TEXT_OR_BRACKET = re.compile(rb'"(?:[^"\\]|\\.)*+"|[\[\]{}]', re.DOTALL)


class MalformedJSON(DomainError):
    """400: the text is not the JSON that is asked for. The message says why, without quoting the text."""


def parse_object(raw: bytes) -> dict[str, Any]:
    """``raw`` as a JSON object; an empty body is ``{}``. Raises MalformedJSON (400)."""
    if not raw:
        return {}
    value = parse_value(raw)
    if not isinstance(value, dict):
        raise MalformedJSON("The body must be a JSON object.")
    return value


def parse_value(raw: bytes) -> Any:
    """Any strict JSON value. Raises MalformedJSON (400)."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise MalformedJSON("The body is not valid UTF-8.") from None
    # Before parsing: the depth at which a parser gives up depends on the thread's stack.
    check_depth(raw)
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_float=_fraction,
            parse_int=_integer,
            parse_constant=_refuse_constant,
        )
    except (ValueError, RecursionError) as error:
        place = f" (line {error.lineno}, column {error.colno})" if isinstance(error, json.JSONDecodeError) else ""
        raise MalformedJSON(f"The body is not valid JSON{place}.") from None
    if "\\u" in text:  # neither can come from plain UTF-8
        check_text(value)
    return value


def check_depth(raw: bytes) -> None:
    deepest = settings.API_MAX_JSON_DEPTH
    if raw.count(b"[") + raw.count(b"{") <= deepest:
        return
    depth = 0
    for match in _TEXT_OR_BRACKET.finditer(raw):
        sign = match[0]
        if sign in b"[{":
            depth += 1
            if depth > deepest:
                raise MalformedJSON(f"The body is nested more than {deepest} levels deep.")
        elif sign in b"]}":
            depth -= 1


def check_text(value: Any) -> None:
    """Refuse NUL, which no database column of ours takes, and half characters, which no UTF-8 text has."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            if "\0" in item or any("\ud800" <= character <= "\udfff" for character in item):
                raise MalformedJSON("Text must not hold NUL or lone surrogates.")
        elif isinstance(item, dict):
            waiting.extend(item)
            waiting.extend(item.values())
        elif isinstance(item, list):
            waiting.extend(item)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise MalformedJSON("The body holds a key twice in one object.")
    return found


def _fraction(text: str) -> Decimal:
    number = Decimal(text) if len(text) <= NUMBER_MAX_CHARS else None
    if number is None or (number and abs(number.adjusted()) > EXPONENT_MAX):
        raise MalformedJSON("The body holds a number that is out of range.")
    # Zero may carry any exponent (0E+999999999), and would be written out digit for digit.
    return number if number else Decimal(0)


def _integer(text: str) -> int:
    number = int(text) if len(text) <= NUMBER_MAX_CHARS else None
    if number is None or not -INTEGER_MAX <= number < INTEGER_MAX:
        raise MalformedJSON("The body holds a number that is out of range.")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise MalformedJSON(f"{name} is not a JSON value.")


def dumps(data: Any) -> bytes:
    """``data`` as the bytes of an answer. A lone surrogate from elsewhere becomes ``?`` rather than an error on every
    read.
    """
    text = simplejson.dumps(
        data, use_decimal=False, default=_other, ensure_ascii=False, separators=(",", ":"), allow_nan=False
    )
    return text.encode("utf-8", errors="replace")


def _other(value: Any) -> Any:
    if isinstance(value, Decimal):
        if not value.is_finite():
            raise ValueError("JSON has no such number")
        return RawJSON(format(value, "f"))
    if isinstance(value, datetime):
        return clock.iso(value)
    if isinstance(value, Promise):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")
