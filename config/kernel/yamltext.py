"""YAML text: a strict reader that knows the line of each value, and a writer whose text it reads back exactly.

Scalars are read by the core schema of YAML 1.2 as JSON has them: ``no`` and ``12:30`` are texts. Numbers with a
fraction become Decimal. The reader rejects what readers treat differently (duplicate keys, tags, several documents),
what can grow without limit (anchors, aliases, merge keys, depth) and what cannot be stored (NUL, lone surrogates).
"""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NoReturn

import yaml

from config.kernel.jsontext import INTEGER_MAX, NUMBER_MAX_CHARS

NUMBER = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
WORDS: dict[str, Any] = {"": None, "~": None}
WORDS |= {
    form: value
    for word, value in (("null", None), ("true", True), ("false", False))
    for form in (word, word.capitalize(), word.upper())
}
NOT_NUMBERS = {sign + form for sign in ("", "-", "+") for form in (".inf", ".Inf", ".INF")} | {".nan", ".NaN", ".NAN"}
# YAML reads these as line breaks, some of them as "\n".
OTHER_BREAKS = "\r\x85\u2028\u2029"


class MalformedYAML(ValueError):
    """The text is not the expected YAML. The message is for people and does not quote the text."""

    def __init__(self, message: str, line: int) -> None:
        self.message, self.line = message, line
        super().__init__(f"line {line}: {message}")


@dataclass(frozen=True, slots=True)
class Node:
    """A value and its line: None, a bool, an int, a Decimal, a text, a list of nodes, or a dict of texts to nodes."""

    value: Any
    line: int

    def plain(self) -> Any:
        """The value as ``json.loads`` would return it."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return float(self.value) if isinstance(self.value, Decimal) else self.value


def parse(raw: bytes, *, depth: int) -> Node:
    """The one document of ``raw``, which is UTF-8 and nested at most ``depth`` levels deep. Raises MalformedYAML."""
    line = 1
    try:
        text = raw.decode("utf-8-sig")
        reader = _Reader(depth)
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            line = event.start_mark.line + 1 if event.start_mark else line
            reader.take(event, line)
    except UnicodeDecodeError as error:
        raise MalformedYAML("It is not valid UTF-8.", raw.count(b"\n", 0, error.start) + 1) from None
    except yaml.reader.ReaderError as error:
        # The text is a str, so the position counts its characters.
        raise MalformedYAML("It contains a control character.", text.count("\n", 0, error.position) + 1) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise MalformedYAML(f"It is not valid YAML: {error.problem}.", mark.line + 1 if mark else line) from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        if isinstance(error, MalformedYAML):
            raise
        # An escape such as "\UFFFFFFFF".
        raise MalformedYAML("It is not valid YAML.", line) from None
    return reader.root or Node(None, 1)


class _Reader:
    """Makes nodes of the parser's events, without recursion."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.root: Node | None = None
        # The open lists and mappings, each with the key whose value comes next.
        self.open: list[tuple[Node, str | None]] = []

    def take(self, event: yaml.Event, line: int) -> None:
        if isinstance(event, yaml.DocumentStartEvent) and self.root is not None:
            raise MalformedYAML("It contains more than one document.", line)
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise MalformedYAML("Anchors and aliases are not supported.", line)
        if isinstance(event, yaml.CollectionEndEvent):
            self.open.pop()
        elif isinstance(event, (yaml.ScalarEvent, yaml.CollectionStartEvent)):
            if event.tag is not None:
                raise MalformedYAML("Tags are not supported.", line)
            self._take_value(event, line)

    def _take_value(self, event: yaml.NodeEvent, line: int) -> None:
        parent, key = self.open[-1] if self.open else (None, None)
        if parent is not None and isinstance(parent.value, dict) and key is None:
            self.open[-1] = (parent, self._key(event, parent, line))
            return
        if isinstance(event, yaml.ScalarEvent):
            node = Node(_scalar(event, line), line)
        else:
            if len(self.open) >= self.depth:
                raise MalformedYAML(f"It is nested more than {self.depth} levels deep.", line)
            node = Node({} if isinstance(event, yaml.MappingStartEvent) else [], line)
        if parent is None:
            self.root = node
        elif isinstance(parent.value, list):
            parent.value.append(node)
        else:
            parent.value[key] = node
            self.open[-1] = (parent, None)
        if not isinstance(event, yaml.ScalarEvent):
            self.open.append((node, None))

    def _key(self, event: yaml.NodeEvent, parent: Node, line: int) -> str:
        if not isinstance(event, yaml.ScalarEvent):
            raise MalformedYAML("A key must be a text.", line)
        key = _text(event.value, line)
        if key == "<<" and not event.style:
            raise MalformedYAML("Merge keys are not supported.", line)
        if key in parent.value:
            raise MalformedYAML(f"The key {key[:100]!r} is there twice.", line)
        return key


def _scalar(event: yaml.ScalarEvent, line: int) -> Any:
    if event.style:  # quoted, or a block
        return _text(event.value, line)
    return _plain(event.value, line)


def _plain(text: str, line: int) -> Any:
    """What a scalar without quotes means."""
    if text in WORDS:
        return WORDS[text]
    if NUMBER.fullmatch(text):
        return _number(text, line)
    if text in NOT_NUMBERS:
        raise MalformedYAML(f"{text} is not supported.", line)
    return _text(text, line)


def _number(text: str, line: int) -> int | Decimal:
    if len(text) > NUMBER_MAX_CHARS or not math.isfinite(float(text)):
        _out_of_range(line)
    # Zero may have any exponent (0E+999999999).
    number = Decimal(text if float(text) else str(float(text)))
    if text.lstrip("+-").isdigit():
        if not -INTEGER_MAX <= number < INTEGER_MAX:
            _out_of_range(line)
        return int(number)
    return number


def _out_of_range(line: int) -> NoReturn:
    raise MalformedYAML("A number is out of range.", line)


def _text(text: str, line: int) -> str:
    """``text`` with its pairs of surrogates joined: a text in double quotes may have them, as in JSON."""
    if "\0" in text:
        raise MalformedYAML("A text contains NUL.", line)
    if any("\ud800" <= character <= "\udfff" for character in text):
        try:
            return text.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            raise MalformedYAML("A text contains a lone surrogate.", line) from None
    return text


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _write_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = None
    if any(character in text for character in OTHER_BREAKS):
        style = '"'
    elif "\n" in text:
        style = "|"
    elif text in WORDS or text in NOT_NUMBERS or NUMBER.fullmatch(text):
        style = "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _write_decimal(dumper: yaml.SafeDumper, number: Decimal) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:float", format(number, "f"))


def _write_integer(dumper: yaml.SafeDumper, number: int) -> yaml.Node:
    # PostgreSQL's JSON columns return 1e20 as an integer.
    fits = -INTEGER_MAX <= number < INTEGER_MAX
    return dumper.represent_int(number) if fits else dumper.represent_float(float(number))


_Dumper.add_representer(str, _write_text)
_Dumper.add_representer(Decimal, _write_decimal)
_Dumper.add_representer(int, _write_integer)


def to_text(data: Any) -> str:
    """``data`` (as JSON, with Decimal) as YAML in block style, with the keys in their order."""
    written: str = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=sys.maxsize)
    return written
