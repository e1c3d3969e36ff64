"""JSON text: one strict reader and one exact writer.

The reader is bounded, and exact unless it is asked for floats: numbers with a fraction become Decimal. It refuses what
one JSON reader takes and another does not (duplicate keys, NaN, lone surrogates) and what a database cannot store
(NUL). The writer gives compact text with every amount digit for digit.
"""

from __future__ import annotations

import json
import math
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

# The closing quote is optional: a string that never ends is then read once, and not again from each quote in it.
_TEXT_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[\]{}]', re.DOTALL)
OUT_OF_RANGE = "holds a number that is out of range"


class MalformedJSON(DomainError):
    """400: the text is not the JSON that is asked for. The message says why, without quoting the text."""


class _Refused(ValueError):
    """What a text does wrong, as the end of a sentence whose subject is the text."""


def parse_object(raw: bytes | str, *, subject: str = "The body", floats: bool = False) -> dict[str, Any]:
    """``raw`` as a JSON object; an empty text is ``{}``. Raises MalformedJSON as ``parse_value`` does."""
    if not raw:
        return {}
    value = parse_value(raw, subject=subject, floats=floats)
    if not isinstance(value, dict):
        raise MalformedJSON(f"{subject} must be a JSON object.")
    return value


def parse_value(raw: bytes | str, *, subject: str = "The body", floats: bool = False) -> Any:
    """Any strict JSON value. Numbers with a fraction are Decimal, or float where the reader of the value needs floats.

    Raises MalformedJSON (400), whose message begins with ``subject``.
    """
    try:
        text = raw if isinstance(raw, str) else raw.decode("utf-8")
        # Before parsing: the depth at which a parser gives up depends on the thread's stack.
        _check_depth(text)
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_float=_float if floats else _decimal,
            parse_int=_integer,
            parse_constant=_refuse_constant,
        )
        if "\\u" in text or text is raw:  # plain UTF-8 holds neither NUL within a JSON text nor surrogates
            _check_text(value)
    except UnicodeDecodeError:
        raise MalformedJSON(f"{subject} is not valid UTF-8.") from None
    except _Refused as refused:
        raise MalformedJSON(f"{subject} {refused}.") from None
    except (ValueError, RecursionError) as error:
        place = f" (line {error.lineno}, column {error.colno})" if isinstance(error, json.JSONDecodeError) else ""
        raise MalformedJSON(f"{subject} is not valid JSON{place}.") from None
    return value


def _check_depth(text: str) -> None:
    deepest = settings.API_MAX_JSON_DEPTH
    if text.count("[") + text.count("{") <= deepest:
        return
    depth = 0
    for match in _TEXT_OR_BRACKET.finditer(text):
        sign = match[0]
        if sign in "[{":
            depth += 1
            if depth > deepest:
                raise _Refused(f"is nested more than {deepest} levels deep")
        elif sign in "]}":
            depth -= 1


def _check_text(value: Any) -> None:
    """Refuse NUL, which no database column of ours takes, and half characters, which no UTF-8 text has."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            if "\0" in item or any("\ud800" <= character <= "\udfff" for character in item):
                raise _Refused("holds text with NUL or a lone surrogate")
        elif isinstance(item, dict):
            waiting.extend(item)
            waiting.extend(item.values())
        elif isinstance(item, list):
            waiting.extend(item)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _Refused("holds a key twice in one object")
    return found


def _decimal(text: str) -> Decimal:
    number = Decimal(text) if len(text) <= NUMBER_MAX_CHARS else None
    if number is None or (number and abs(number.adjusted()) > EXPONENT_MAX):
        raise _Refused(OUT_OF_RANGE)
    # Zero may have any exponent (0E+999999999), and would be written out digit for digit.
    return number if number else Decimal(0)


def _float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise _Refused(OUT_OF_RANGE)
    return number


def _integer(text: str) -> int:
    number = int(text) if len(text) <= NUMBER_MAX_CHARS else None
    if number is None or not -INTEGER_MAX <= number < INTEGER_MAX:
        raise _Refused(OUT_OF_RANGE)
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise _Refused(f"holds {name}, which is not a JSON value")


def dumps(data: Any) -> bytes:
    """``data`` as the bytes of an answer. A lone surrogate from elsewhere becomes ``?`` rather than an error on every
    read.
    """
    return to_text(data).encode("utf-8", errors="replace")


def to_text(data: Any) -> str:
    """``data`` as compact JSON text. Raises ValueError for NaN and infinity, TypeError for what JSON does not have."""
    return simplejson.dumps(
        data, use_decimal=False, default=_other, ensure_ascii=False, separators=(",", ":"), allow_nan=False
    )


def _other(value: Any) -> Any:
    if isinstance(value, Decimal):
        if not value.is_finite():
            raise ValueError("JSON has no such number")
        # Only amounts of others are that large or small; written out, one could fill the memory.
        return RawJSON(str(value) if abs(value.adjusted()) > EXPONENT_MAX else format(value, "f"))
    if isinstance(value, datetime):
        return clock.iso(value)
    if isinstance(value, Promise):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")
