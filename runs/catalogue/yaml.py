"""YAML text: a strict reader that knows the line of each value, and a writer whose text the reader reads back exactly.
Scalars are read as in JSON: ``no`` and ``12:30`` are texts, and numbers with a fraction become Decimal. The reader
rejects what other readers interpret differently (duplicate keys, tags, several documents), what can grow without limit
(aliases, merge keys, depth) and what cannot be stored (NUL).
"""

import re
import sys
from decimal import Decimal
from typing import Any, TypeAlias

import yaml

from config.kernel.jsontext import MalformedJSON, parse_value

Path: TypeAlias = tuple[str | int, ...]  # the keys and indexes that lead to a value

PREFIX = "tag:yaml.org,2002:"
SCALARS = {
    "null": re.compile(r"(?:~|null|Null|NULL)?\Z"),
    "bool": re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"),
    "int": re.compile(r"-?(?:0|[1-9][0-9]*)\Z"),
    "float": re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?\Z"),
}
OTHER_BREAKS = re.compile("[\x85\u2028\u2029]")  # YAML reads these characters as "\n"


class MalformedYAML(ValueError):
    """The message is for people and does not quote the text."""

    def __init__(self, message: str, line: int) -> None:
        self.message, self.line = message, line
        super().__init__(f"line {line}: {message}")


class _Loader(yaml.CSafeLoader):
    yaml_implicit_resolvers = dict[str, Any]()


class _Dumper(yaml.SafeDumper):
    """Quotes each text that the loader would not read as a text."""

    yaml_implicit_resolvers = dict[str, Any]()

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _name, _pattern in SCALARS.items():
    _Loader.add_implicit_resolver(PREFIX + _name, _pattern, None)
    _Dumper.add_implicit_resolver(PREFIX + _name, _pattern, None)


def parse(raw: bytes, *, depth: int) -> tuple[Any, dict[Path, int]]:
    """The only document in ``raw``, and the line of each of its parts. Raises MalformedYAML."""
    lines: dict[Path, int] = {(): 1}
    try:
        level = 0
        # Before the tree is built: its builder follows aliases, and crashes if the text is nested too deeply.
        for event in yaml.parse(raw, Loader=_Loader):
            level += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            line = event.start_mark.line + 1 if event.start_mark else 1
            if level > depth:
                raise MalformedYAML(f"It is nested more than {depth} levels deep.", line)
            if isinstance(event, yaml.AliasEvent):
                raise MalformedYAML("Aliases are not supported.", line)
        node = yaml.compose(raw, Loader=_Loader)
    except yaml.reader.ReaderError as error:
        line = raw.count(b"\n", 0, error.position) + 1
        raise MalformedYAML("It is not valid UTF-8, or contains a control character.", line) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise MalformedYAML(f"It is not valid YAML: {error.problem}.", mark.line + 1 if mark else 1) from None
    return None if node is None else _value(node, (), lines), lines


def _value(node: yaml.Node, path: Path, lines: dict[Path, int]) -> Any:
    lines[path] = line = node.start_mark.line + 1
    tag = node.tag.removeprefix(PREFIX)
    if isinstance(node, yaml.ScalarNode) and tag in (*SCALARS, "str"):
        return _scalar(tag, node.value, line)
    if tag not in ("map", "seq"):
        raise MalformedYAML("Tags are not supported.", line)
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, (*path, index), lines) for index, item in enumerate(node.value)]
    found: dict[str, Any] = {}
    for name, item in node.value:
        line = name.start_mark.line + 1
        if not isinstance(name, yaml.ScalarNode):
            raise MalformedYAML("A key must be a text.", line)
        key = _scalar("str", name.value, line)
        if key in found:
            raise MalformedYAML(f"The key {key[:100]!r} is there twice.", line)
        found[key] = _value(item, (*path, key), lines)
    return found


def _scalar(tag: str, text: str, line: int) -> Any:
    if "\0" in text:
        raise MalformedYAML("A text contains NUL.", line)
    if tag == "str":
        return text
    if tag in ("null", "bool"):
        return None if tag == "null" else text.lower() == "true"
    try:
        return parse_value(text, subject="It")
    except MalformedJSON as error:
        raise MalformedYAML(error.message, line) from None


def _write_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = '"' if OTHER_BREAKS.search(text) else "|" if "\n" in text else None
    return dumper.represent_scalar(f"{PREFIX}str", text, style=style)


def _write_decimal(dumper: yaml.SafeDumper, number: Decimal) -> yaml.Node:
    text = format(number, "f")
    return dumper.represent_scalar(f"{PREFIX}{'float' if '.' in text else 'int'}", text)


_Dumper.add_representer(str, _write_text)
_Dumper.add_representer(Decimal, _write_decimal)


def to_text(data: Any) -> str:
    """``data`` (as JSON, with Decimal) as YAML in block style, with the keys in their order."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=sys.maxsize)
