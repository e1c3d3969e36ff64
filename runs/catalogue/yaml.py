"""YAML text: a strict reader that knows the line of each value, and a writer whose text it reads back exactly.

Scalars are read by the core schema of YAML 1.2 as JSON has them: ``no`` and ``12:30`` are texts. Numbers with a
fraction become Decimal. The reader rejects what readers treat differently (duplicate keys, tags, several documents),
what can grow without limit (anchors, aliases, merge keys, depth) and what cannot be stored (NUL).
"""

from __future__ import annotations

import math
import re
import sys
from decimal import Decimal
from typing import Any, TypeAlias

import yaml

from config.kernel.jsontext import NUMBER_MAX_CHARS

# The keys and indexes that lead to a value.
Path: TypeAlias = tuple[str | int, ...]

NUMBER = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
NOT_A_NUMBER = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
WORDS: dict[str, Any] = {"": None, "~": None}
for _word, _value in (("null", None), ("true", True), ("false", False)):
    WORDS |= dict.fromkeys((_word, _word.capitalize(), _word.upper()), _value)
# YAML reads these as line breaks, some of them as "\n".
OTHER_BREAKS = "\r\x85\u2028\u2029"
# The lines of deeper values are not kept.
LINES_DEPTH = 4


class MalformedYAML(ValueError):
    """The text is not the expected YAML. The message is for people and does not quote the text."""

    def __init__(self, message: str, line: int) -> None:
        self.message, self.line = message, line
        super().__init__(f"line {line}: {message}")


def parse(raw: bytes, *, depth: int) -> tuple[Any, dict[Path, int]]:
    """The value of the one document of ``raw``, which is UTF-8 and nested at most ``depth`` levels deep, and the lines
    of its parts. Raises MalformedYAML.
    """
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise MalformedYAML("It is not valid UTF-8.", raw.count(b"\n", 0, error.start) + 1) from None
    reader = _Reader(depth)
    try:
        reader.events = yaml.parse(text, Loader=yaml.CSafeLoader)
        return reader.document(), reader.lines
    except yaml.reader.ReaderError as error:
        # The text is a str, so the position counts its characters.
        raise MalformedYAML("It contains a control character.", text.count("\n", 0, error.position) + 1) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise MalformedYAML(f"It is not valid YAML: {error.problem}.", mark.line + 1 if mark else reader.line) from None


class _Reader:
    """Makes values of the parser's events."""

    events: Any

    def __init__(self, depth: int) -> None:
        self.depth, self.line = depth, 1
        self.lines: dict[Path, int] = {(): 1}

    def document(self) -> Any:
        self.next()
        if isinstance(self.next(), yaml.StreamEndEvent):
            return None
        value = self.value(self.next(), ())
        self.next()
        if not isinstance(self.next(), yaml.StreamEndEvent):
            self.fail("It contains more than one document.")
        return value

    def next(self) -> yaml.Event:
        event = next(self.events)
        self.line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            self.fail("Anchors and aliases are not supported.")
        if getattr(event, "tag", None) is not None:
            self.fail("Tags are not supported.")
        return event

    def fail(self, message: str) -> None:
        raise MalformedYAML(message, self.line)

    def value(self, event: yaml.Event, path: Path) -> Any:
        if len(path) <= LINES_DEPTH:
            self.lines[path] = self.line
        if isinstance(event, yaml.ScalarEvent):
            return self.text(event.value) if event.style else self.plain(event.value)
        if len(path) >= self.depth:
            self.fail(f"It is nested more than {self.depth} levels deep.")
        if isinstance(event, yaml.SequenceStartEvent):
            items: list[Any] = []
            while not isinstance(event := self.next(), yaml.SequenceEndEvent):
                items.append(self.value(event, (*path, len(items))))
            return items
        found: dict[str, Any] = {}
        while not isinstance(event := self.next(), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent):
                raise MalformedYAML("A key must be a text.", self.line)
            key = self.text(event.value)
            if key == "<<" and not event.style:
                self.fail("Merge keys are not supported.")
            if key in found:
                self.fail(f"The key {key[:100]!r} is there twice.")
            found[key] = self.value(self.next(), (*path, key))
        return found

    def plain(self, text: str) -> Any:
        """What a scalar without quotes means."""
        if text in WORDS:
            return WORDS[text]
        if NOT_A_NUMBER.fullmatch(text):
            self.fail(f"{text} is not supported.")
        if not NUMBER.fullmatch(text):
            return self.text(text)
        if len(text) > NUMBER_MAX_CHARS or not math.isfinite(float(text)):
            self.fail("A number is out of range.")
        # Zero may have any exponent (0E+999999999).
        number = Decimal(text if float(text) else str(float(text)))
        return int(number) if text.lstrip("+-").isdigit() else number

    def text(self, text: str) -> str:
        if "\0" in text:
            self.fail("A text contains NUL.")
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
    elif NUMBER.fullmatch(text):
        style = "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _write_decimal(dumper: yaml.SafeDumper, number: Decimal) -> yaml.Node:
    text = format(number, "f")
    return dumper.represent_scalar(f"tag:yaml.org,2002:{'float' if '.' in text else 'int'}", text)


_Dumper.add_representer(str, _write_text)
_Dumper.add_representer(Decimal, _write_decimal)


def to_text(data: Any) -> str:
    """``data`` (as JSON, with Decimal) as YAML in block style, with the keys in their order."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=sys.maxsize)
