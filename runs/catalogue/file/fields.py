"""The fields of the catalogue file: how each is read, compared with its column, and written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from config.api.serializers import unknown_fields
from config.kernel import money
from config.kernel.jsontext import to_text
from config.kernel.yamltext import Node
from runs.catalogue.file.base import MISTAKES_MAX, Misplaced, Work, has_variable, with_variables
from runs.catalogue.rules import HEADERS_MAX_CHARS, NO_ADDRESS
from runs.tools.base import is_address, parse_headers

# What the columns of both databases hold.
WHOLE_MAX = 2**31 - 1


class Rule:
    """What a missing field means, if it does not mean a value."""


REQUIRED, KEPT = Rule(), Rule()


@dataclass(frozen=True, slots=True)
class Field:
    """``read`` makes the column's value of a node that is not null, and raises ValueError with a message for people.
    ``default`` is the column's value where the file has none or null; REQUIRED; KEPT, which leaves the column as it
    is; or a function of the entry's other values. ``show`` makes the file's value of the column's. ``source``: the
    column for the file's own text, if that contains a variable.
    """

    name: str
    column: str
    read: Callable[[Node], Any]
    default: Any = REQUIRED
    show: Callable[[Any], Any] = lambda value: value
    same: Callable[[Any, Any], bool] = lambda before, after: bool(before == after)
    secret: bool = False
    source: str = ""


@dataclass(slots=True)
class Entry:
    """One row of the file. ``values`` and ``lines`` are by column; a column that is kept is in neither."""

    place: str
    line: int
    values: dict[str, Any]
    lines: dict[str, int]

    def default(self, field: Field) -> Any:
        return field.default(self.values) if callable(field.default) else field.default


def read_table(table_name: str, table: tuple[Field, ...], node: Node, work: Work) -> dict[str, Entry]:
    """The entries of a list by their names, without those that have a mistake."""
    found: dict[str, Entry] = {}
    if not isinstance(node.value, list):
        work.wrong(node.line, table_name, "A list is required; [] is the empty one.")
        return found
    for index, item in enumerate(node.value, 1):
        if len(work.mistakes) > MISTAKES_MAX:
            break
        own = item.value.get("name") if isinstance(item.value, dict) else None
        label = own.value if own is not None and isinstance(own.value, str) and own.value else f"({index})"
        entry = read_entry(item, f"{table_name}.{label[:100]}", table, work)
        if entry is None:
            continue
        if entry.values["name"] in found:
            work.wrong(entry.lines["name"], f"{entry.place}.name", "The name is there twice.")
        found[entry.values["name"]] = entry
    return found


def read_entry(node: Node, place: str, fields: tuple[Field, ...], work: Work) -> Entry | None:
    """The entry, or None if it has a mistake."""
    before = len(work.mistakes)
    if not isinstance(node.value, dict):
        work.wrong(node.line, place, "It must be a mapping.")
        return None
    known = [field.name for field in fields]
    for key, value in node.value.items():
        for messages in unknown_fields({key: None}, known).values():
            work.wrong(value.line, f"{place}.{key[:100]}", " ".join(messages))
    entry = Entry(place, node.line, {}, {})
    given = [(field, node.value[field.name]) for field in fields if field.name in node.value]
    for field, found in given:
        if found.value is None and not field.secret:
            continue
        entry.lines[field.column] = found.line
        try:
            entry.values[field.column] = None if found.value is None else field.read(found)
        except ValueError as error:
            line = error.line if isinstance(error, Misplaced) else found.line
            work.wrong(line, f"{place}.{field.name}", str(error))
    for field in fields:
        if field.source:
            text = node.value[field.name].value if field.column in entry.lines else ""
            entry.values[field.source] = text if has_variable(text) else ""
        if field.column in entry.lines:
            continue
        default = entry.default(field)
        if default is REQUIRED:
            work.wrong(node.line, f"{place}.{field.name}", "This field is required.")
        elif default is not KEPT:
            entry.values[field.column] = default
    return entry if len(work.mistakes) == before else None


def text(node: Node) -> str:
    if not isinstance(node.value, str):
        hint = " Put it in quotes." if isinstance(node.value, (bool, int, Decimal)) else ""
        raise ValueError(f"A text is required.{hint}")
    return node.value


def name(node: Node) -> str:
    value = text(node)
    if value != value.strip():
        raise ValueError("It begins or ends with a blank.")
    return value


def own_name(values: dict[str, Any]) -> Any:
    """The default of a field that is as the entry's name."""
    return values.get("name", "")


def choice(*names: str) -> Callable[[Node], str]:
    def read(node: Node) -> str:
        if node.value not in names:
            raise ValueError(f"Use one of {', '.join(names)}.")
        return str(node.value)

    return read


def address(node: Node) -> str:
    """An address, or nothing. It may contain variables, because it differs between installations."""
    url = with_variables(text(node))
    if url and not is_address(url):
        raise ValueError(NO_ADDRESS)
    return url


def without_variables(url: str) -> str:
    return url.replace("${", "$${")


def flag(node: Node) -> bool:
    if not isinstance(node.value, bool):
        raise ValueError("Use true or false.")
    return node.value


def whole(node: Node) -> int:
    if type(node.value) is not int or abs(node.value) > WHOLE_MAX:
        raise ValueError(f"A whole number up to {WHOLE_MAX} is required.")
    return node.value


def amount(minimum: int) -> Callable[[Node], int]:
    """Credits, as micro-credits. ``minimum`` is in micro-credits."""

    def read(node: Node) -> int:
        if isinstance(node.value, str):
            raise ValueError("A number is required.")
        return money.parse(node.value, minimum=minimum, field="The number")

    return read


def number(low: float, high: float) -> Callable[[Node], float]:
    def read(node: Node) -> float:
        value = node.value
        if isinstance(value, bool) or not isinstance(value, (int, Decimal)) or not low <= value <= high:
            raise ValueError(f"Use a number from {low:g} to {high:g}.")
        return float(value)

    return read


def mapping(check: Callable[[Any], Any]) -> Callable[[Node], dict[str, Any]]:
    """A JSON object that ``check`` accepts."""

    def read(node: Node) -> dict[str, Any]:
        if not isinstance(node.value, dict):
            raise ValueError("A mapping is required.")
        value: dict[str, Any] = node.plain()
        check(value)
        return value

    return read


def names(node: Node) -> list[str]:
    if not isinstance(node.value, list) or not all(isinstance(item.value, str) for item in node.value):
        raise ValueError("A list of names is required.")
    return [item.value for item in node.value]


def secret(limit: int, check: Callable[[str], Any] = str) -> Callable[[Node], str | None]:
    def read(node: Node) -> str | None:
        value = with_variables(text(node)).strip()
        if len(value) > limit:
            raise ValueError(f"At most {limit} characters.")
        check(value)
        return value or None

    return read


def headers(node: Node) -> str | None:
    """A mapping of names to secret values, as JSON text."""
    if not isinstance(node.value, dict):
        raise ValueError("A mapping of header names to values is required.")
    found = {}
    for name, value in node.value.items():
        try:
            found[name] = with_variables(text(value))
            parse_headers(to_text({name: found[name]}))
        except ValueError as error:
            raise Misplaced(str(error), value.line) from None
    written = to_text(found)
    if len(written) > HEADERS_MAX_CHARS:
        raise ValueError(f"At most {HEADERS_MAX_CHARS} characters.")
    return written if found else None


def same_headers(before: str | None, after: str | None) -> bool:
    try:
        return parse_headers(before) == parse_headers(after)
    except ValueError:
        return False


def ordered(value: Any) -> Any:
    """With sorted keys, because PostgreSQL does not keep their order."""
    if isinstance(value, Mapping):
        return {key: ordered(value[key]) for key in sorted(value)}
    return [ordered(item) for item in value] if isinstance(value, list) else value


def optional_amount(value: int | None) -> Any:
    return None if value is None else money.to_number(value)


def plain_number(value: float | None) -> Any:
    return int(value) if value is not None and value.is_integer() else value


ENABLED = Field("enabled", "enabled", flag, True)
