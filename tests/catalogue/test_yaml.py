"""The strict reader of YAML, and the writer whose text it reads back."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from runs.catalogue.yaml import MalformedYAML, parse, to_text

# What readers of YAML 1.1, of YAML 1.2 and of JSON treat differently, as texts.
ODD = [
    "no",
    "on",
    "1e5",
    "1.5",
    "0x1f",
    "0o7",
    "12:30",
    "null",
    "~",
    "",
    "=",
    "<<",
    "2024-01-01",
    "1_000",
    ".5",
    ".inf",
]
ODD += [
    "- a",
    "? a",
    "!x",
    "&a",
    "*a",
    "+1",
    "a: b",
    "a #b",
    " a",
    "a ",
    "a\n",
    "\na",
    " a\nb",
    "a\n\n",
    "\t",
    "a\r\nb",
]
ODD += ["\x85", "\u2028", "\ufeff", "\x07", "'", '"', "${A}", "%", "@", "`", "é\n😀", "---", "...", "#", "a\n  b\n c"]
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")) | st.sampled_from(ODD)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.decimals(-(10**20), 10**20, places=9).filter(bool)
    | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
    max_leaves=20,
)


@pytest.mark.slow
@hypothesis_settings(deadline=None, max_examples=300)
@given(VALUES)
@example(ODD)
@example({text: text for text in ODD})
def test_what_is_written_is_read_back(value: Any) -> None:
    found = parse(to_text(value).encode(), depth=100)[0]
    assert found == value
    assert repr(found) == repr(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: no", {"a": "no"}),
        ("a: yes", {"a": "yes"}),
        ("a: 12:30", {"a": "12:30"}),
        ("a: 2026-01-31", {"a": "2026-01-31"}),
        ("a: 010", {"a": "010"}),
        ("a: .5", {"a": ".5"}),
        ("a: .nan", {"a": ".nan"}),
        ("a: !!str 1", {"a": "1"}),
        ("a: True", {"a": True}),
        ("1: a\nnull: b", {"1": "a", "null": "b"}),
        ('{"a": [1, {"b": null}]}', {"a": [1, {"b": None}]}),
        ("\ufeffa: |\n  x\n  y\n", {"a": "x\ny\n"}),
        ("", None),
    ],
)
def test_values_have_the_types_of_json(text: str, value: Any) -> None:
    assert parse(text.encode(), depth=10)[0] == value


def test_numbers_with_a_fraction_are_exact() -> None:
    assert str(parse(b"0.10", depth=1)[0]) == "0.10"


BOMB = "a: &a [x, x]\n" + "".join(
    f"{name}: &{name} [*{before}, *{before}]\n" for before, name in zip("abcde", "bcdef", strict=True)
)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (BOMB, 2),
        ("b: 1\na: *x", 2),
        ("a: !!python/object/apply:os.system [true]", 1),
        ("a: 1\n\na: 2", 3),
        ("a: 1\n---\nb: 1", 2),
        ("a:\n  [1, 2", 3),
        ("a:\n\t- b", 2),
        ("? [a]\n: b", 1),
        ("a: 1\nb: 1e400", 2),
        ("a: " + "9" * 100_000, 1),
        ('a: "\\ud800"', 1),
        ('a:\n- "\\0"', 2),
        ('a:\n- "\\UFFFFFFFF"', 2),
        ("a:\n  \0", 2),
        (b"a: 1\nb: \xff", 2),
        ("a: 1\nb: " + "[" * 500_000, 2),
        ("a: 1\n" + "- " * 500_000, 2),
        ("a: 1\nb: " + "{a: " * 250_000, 2),
    ],
)
def test_what_is_not_accepted_is_an_error_with_its_line(text: str | bytes, line: int) -> None:
    with pytest.raises(MalformedYAML) as error:
        parse(text if isinstance(text, bytes) else text.encode(), depth=60)
    assert error.value.line == line
