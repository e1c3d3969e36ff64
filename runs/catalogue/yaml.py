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
for _word, _meaning in (("null", None), ("true", True), ("false", False)):
    WORDS |= dict.fromkeys((_word, _word.capitalize(), _word.upper()), _meaning)
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
    lines: dict[Path, int] = {(): 1}
    try:
        text = raw.decode("utf-8-sig")
        _check(text, depth)
        root = yaml.compose(text, Loader=yaml.CSafeLoader)
        return None if root is None else _value(root, (), lines), lines
    except UnicodeDecodeError as error:
        raise MalformedYAML("It is not valid UTF-8.", raw.count(b"\n", 0, error.start) + 1) from None
    except yaml.reader.ReaderError as error:
        # The text is a str, so the position counts its characters.
        raise MalformedYAML("It contains a control character.", text.count("\n", 0, error.position) + 1) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise MalformedYAML(f"It is not valid YAML: {error.problem}.", mark.line + 1 if mark else 1) from None


def _check(text: str, depth: int) -> None:
    """Before the nodes are made, which takes the stack of the process for each level."""
    level = 0
    for event in yaml.parse(text, Loader=yaml.CSafeLoader):
        level += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        problem = f"It is nested more than {depth} levels deep." if level > depth else ""
        if isinstance(event, yaml.NodeEvent) and event.anchor is not None:
            problem = "Anchors and aliases are not supported."
        elif getattr(event, "tag", None) is not None:
            problem = "Tags are not supported."
        if problem:
            raise MalformedYAML(problem, _line(event))


def _value(node: yaml.Node, path: Path, lines: dict[Path, int]) -> Any:
    line = _line(node)
    if len(path) <= LINES_DEPTH:
        lines[path] = line
    if isinstance(node, yaml.ScalarNode):
        return _text(node.value, line) if node.style else _plain(node.value, line)
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, (*path, index), lines) for index, item in enumerate(node.value)]
    found: dict[str, Any] = {}
    for name, item in node.value:
        line = _line(name)
        if not isinstance(name, yaml.ScalarNode):
            raise MalformedYAML("A key must be a text.", line)
        key = _text(name.value, line)
        if key == "<<" and not name.style:
            raise MalformedYAML("Merge keys are not supported.", line)
        if key in found:
            raise MalformedYAML(f"The key {key[:100]!r} is there twice.", line)
        found[key] = _value(item, (*path, key), lines)
    return found


def _line(part: yaml.Event | yaml.Node) -> int:
    return part.start_mark.line + 1 if part.start_mark else 1


def _plain(text: str, line: int) -> Any:
    """What a scalar without quotes means."""
    if text in WORDS:
        return WORDS[text]
    if NOT_A_NUMBER.fullmatch(text):
        raise MalformedYAML(f"{text} is not supported.", line)
    if not NUMBER.fullmatch(text):
        return _text(text, line)
    if len(text) > NUMBER_MAX_CHARS or not math.isfinite(float(text)):
        raise MalformedYAML("A number is out of range.", line)
    # Zero may have any exponent (0E+999999999).
    number = Decimal(text if float(text) else str(float(text)))
    return int(number) if text.lstrip("+-").isdigit() else number


def _text(text: str, line: int) -> str:
    if "\0" in text:
        raise MalformedYAML("A text contains NUL.", line)
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
    written: str = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=sys.maxsize)
    return written
