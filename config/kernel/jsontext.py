"""JSON text: the only strict reader and the only exact writer of the service, its column, and how values are compared.

Both keep each digit: a number with a fraction is a Decimal. The reader limits depth, numbers and the count of values,
and rejects what readers treat differently (duplicate keys, NaN, lone surrogates) or cannot be stored (NUL).
"""

import json
from datetime import date, datetime
from decimal import Decimal
from itertools import accumulate
from typing import Any, NoReturn

import simplejson
from django.db import models
from django.utils.functional import Promise
from simplejson import RawJSON

from config.kernel import clock
from config.kernel.errors import DomainError

API_MAX_JSON_DEPTH = 64  # deeper JSON is answered with 400
# Limits of numbers: more digits than an amount, an id or a hash has, and the exponents of a double.
NUMBER_MAX_CHARS = 1000
EXPONENT_MIN, EXPONENT_MAX = -324, 308
INTEGER_MAX = 2**63  # the integers of a signed 64-bit column
# This many values are read or written within a few milliseconds, during which no other thread of the process runs.
VALUES_MAX = 50_000
# Numbers with a larger exponent are written with the exponent: all digits could take fifty times the space.
PLAIN_EXPONENT_MAX = 30

_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NO_BRACKETS = bytes(set(range(256)) - set(_STEPS))
OUT_OF_RANGE = "contains a number that is out of range"


class MalformedJSON(DomainError):
    """400: the text is not the expected JSON. The message names the reason and does not quote the text."""


class _Invalid(ValueError):
    """The reason why a text is not accepted, as a predicate: the caller adds the subject."""


def parse_object(raw: bytes | str, *, subject: str = "The body", **options: Any) -> dict[str, Any]:
    """``raw`` as a JSON object; an empty text is ``{}``. Options and errors are those of ``parse_value``."""
    value = parse_value(raw, subject=subject, **options) if raw else {}
    if not isinstance(value, dict):
        raise MalformedJSON(f"{subject} must be a JSON object.")
    return value


def parse_value(
    raw: bytes | str, *, subject: str = "The body", values: int = VALUES_MAX, any_text: bool = False
) -> Any:
    """``raw`` as any JSON value of at most ``values`` values. With ``any_text``, the caller checks the texts that it
    uses by ``require_text``. Raises MalformedJSON (400), whose message begins with ``subject``.
    """
    try:
        text = raw if isinstance(raw, str) else raw.decode("utf-8")
        if has_more_values(text, values):
            raise _Invalid(f"has more than {values} values")
        # Before parsing, because the depth at which the parser fails depends on the thread's stack.
        if is_deeper(text, API_MAX_JSON_DEPTH):
            raise _Invalid(f"is nested more than {API_MAX_JSON_DEPTH} levels deep")
        value = json.loads(
            text, object_pairs_hook=_object, parse_float=_decimal, parse_int=_integer, parse_constant=_refuse_constant
        )
        # Decoded UTF-8 has no surrogates, and the parser rejects a raw NUL.
        if not any_text and ("\\u" in text or text is raw):
            require_text(value, subject=subject)
    except UnicodeDecodeError:
        raise MalformedJSON(f"{subject} is not valid UTF-8.") from None
    except _Invalid as reason:
        raise MalformedJSON(f"{subject} {reason}.") from None
    except (ValueError, ArithmeticError, RecursionError) as error:
        place = f" (line {error.lineno}, column {error.colno})" if isinstance(error, json.JSONDecodeError) else ""
        raise MalformedJSON(f"{subject} is not valid JSON{place}.") from None
    return value


def has_more_values(raw: bytes | str, most: int) -> bool:
    """Whether JSON text has about more than ``most`` values. Counted without parsing and without a loop in Python."""
    text = raw if isinstance(raw, str) else raw.decode("latin-1")
    if _signs(text) <= most:
        return False
    plain = _without_escapes(text)
    # Each value and its key can be a text, which has two quotation marks.
    return plain.count('"') > 4 * most or _signs(_outside_of_texts(plain)) > most


def _signs(text: str) -> int:
    return sum(map(text.count, ",[{"))


def _without_escapes(text: str) -> str:
    return text.replace(r"\\", "").replace(r"\"", "") if "\\" in text else text


def _outside_of_texts(plain: str) -> str:
    return "".join(plain.split('"')[::2])


def is_deeper(text: str, most: int) -> bool:
    """Whether JSON text has more than ``most`` levels of objects and lists. Counted as in ``has_more_values``."""
    if text.count("[") + text.count("{") <= most:
        return False
    brackets = _outside_of_texts(_without_escapes(text)).encode("utf-8", "replace").translate(None, _NO_BRACKETS)
    return max(accumulate(map(_STEPS.__getitem__, brackets)), default=0) > most


def require_text(value: Any, *, subject: str = "The body") -> None:
    """Raises MalformedJSON for NUL, which the database cannot store, and lone surrogates, which UTF-8 cannot encode."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            try:
                stored = item.isascii() or item.encode("utf-8")
            except UnicodeEncodeError:
                stored = None
            if stored is None or "\0" in item:
                raise MalformedJSON(f"{subject} contains text with NUL or a lone surrogate.")
        elif isinstance(item, dict):
            waiting.extend(item)
            waiting.extend(item.values())
        elif isinstance(item, list):
            waiting.extend(item)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _Invalid("contains a key twice in one object")
    return found


def _decimal(text: str) -> Decimal:
    number = Decimal(text) if len(text) <= NUMBER_MAX_CHARS else None
    if number is None or (number and not EXPONENT_MIN <= number.adjusted() <= EXPONENT_MAX):
        raise _Invalid(OUT_OF_RANGE)
    # Zero may have any exponent (0E+999999999), and the writer writes each digit.
    return number if number else Decimal(0)


def _integer(text: str) -> int:
    if len(text) > NUMBER_MAX_CHARS:
        raise _Invalid(OUT_OF_RANGE)
    return int(text)


def _refuse_constant(name: str) -> NoReturn:
    raise _Invalid(f"contains {name}, which is not a JSON value")


def dumps(data: Any) -> bytes:
    """``data`` as UTF-8 JSON. A stored lone surrogate becomes ``?``, so that the row can still be read."""
    return to_text(data).encode("utf-8", errors="replace")


def to_text(data: Any, *, indent: int | None = None) -> str:
    """``data`` as JSON text, compact without ``indent``. Raises ValueError (NaN, infinity), TypeError (other types)."""
    signs = (",", ":") if indent is None else (",", ": ")
    return simplejson.dumps(
        data, use_decimal=False, default=_other, ensure_ascii=False, separators=signs, indent=indent, allow_nan=False
    )


def from_text(text: str | bytes) -> Any:
    """The value that ``to_text`` wrote, with each digit of its numbers."""
    return json.loads(text, parse_float=Decimal)


def _other(value: Any) -> Any:
    if isinstance(value, Decimal):
        if not value.is_finite():
            raise ValueError("JSON has no such number")
        text = str(value)
        is_short = "E" in text and abs(value.adjusted()) <= PLAIN_EXPONENT_MAX
        return RawJSON(format(value, "f") if is_short else text)
    if isinstance(value, datetime):
        return clock.iso(value)
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, Promise):  # a translated text of Django
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def same_json(before: Any, after: Any) -> bool:
    """Whether two values are the same JSON, the order of their keys included: models fill properties in order."""
    return to_text(before) == to_text(after)


class JSONTextField(models.TextField):
    """A JSON value as text, which keeps the order of keys and the digits of numbers. No query can look into it."""

    # For mypy: values of any type.
    _pyi_private_set_type: Any
    _pyi_private_get_type: Any

    def from_db_value(self, value: str | None, expression: Any, connection: Any) -> Any:
        return None if value is None else from_text(value)

    def to_python(self, value: Any) -> Any:
        return value

    def get_prep_value(self, value: Any) -> str | None:
        return None if value is None else to_text(value)

    def value_to_string(self, obj: Any) -> str:
        return to_text(self.value_from_object(obj))
