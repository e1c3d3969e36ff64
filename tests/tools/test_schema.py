"""Tests of the input of calls: valid input is passed on unchanged, other input is refused with path and rule."""

import contextlib
import json
import random
import time
from threading import Thread
from typing import Any

import pytest

from config.kernel.errors import RateLimited
from runs.tools.base import ToolFailure
from runs.tools.schema import check_schema, one_check_of
from tests.tools.conftest import builtin, http_tool, parse_input

CHART = builtin("draw_chart")


def refusal(definition, arguments):
    with pytest.raises(ToolFailure) as failure:
        parse_input(definition, arguments)
    return failure.value.code, failure.value.message


def test_valid_input_is_passed_on_unchanged():
    arguments = '{"title": "Größe 😀", "series": [1, -2.5, 1e3]}'
    assert parse_input(CHART, arguments) == {"title": "Größe 😀", "series": [1, -2.5, 1000.0]}


@pytest.mark.parametrize("arguments", ["", "  \n", "{}"])
def test_no_arguments_are_an_empty_object(arguments):
    assert parse_input(http_tool(""), arguments) == {}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("{", "not valid JSON"),
        ('{"title": "a" "series": []}', "column 15"),
        ("[]", "must be a JSON object"),
        ("null", "must be a JSON object"),
        ('"text"', "must be a JSON object"),
        ('{"a": NaN}', "NaN"),
        ('{"a": -Infinity}', "-Infinity"),
        ('{"a": 1e999}', "out of range"),
        ('{"a": ' + "9" * 5000 + "}", "out of range"),
        ('{"a": 1, "a": 2}', "twice"),
        ('{"a": "\\u0000"}', "NUL"),
        ('{"\\u0000": 1}', "NUL"),
        ('{"a": ["\\ud800"]}', "surrogate"),
        ('{"a": ' * 65 + "1" + "}" * 65, "more than 64 levels deep"),
        ("[" * 40_000, "more than 64 levels deep"),
        ("[" * 100_000, "more than 50000 values"),
    ],
)
def test_invalid_json_object_is_refused(arguments, named):
    code, message = refusal(http_tool(""), arguments)
    assert code == "INVALID_INPUT"
    assert named in message


def test_depth_at_the_limit_is_accepted():
    arguments = '{"a": ' * 64 + "1" + "}" * 64
    assert json.dumps(parse_input(http_tool(""), arguments)) == arguments


def test_input_that_is_too_long_is_refused(monkeypatch):
    monkeypatch.setattr("runs.tools.schema.TOOL_INPUT_MAX_CHARS", 100)
    assert parse_input(http_tool(""), json.dumps({"a": "x" * 91}))
    code, message = refusal(http_tool(""), json.dumps({"a": "x" * 92}))
    assert (code, "100 characters" in message) == ("INVALID_INPUT", True)


@pytest.mark.parametrize(
    ("input", "path", "rule"),
    [
        ({"title": "t"}, "the top level", "required"),
        ({"title": "t", "series": [1, "x"]}, "series.1", "type"),
        ({"title": "t", "series": []}, "series", "minItems"),
        ({"title": "t", "series": [1e16]}, "series.0", "maximum"),
        ({"title": "t", "series": [True]}, "series.0", "type"),
        ({"title": "", "series": [1]}, "title", "minLength"),
        ({"title": "t", "series": [1], "x": 1}, "the top level", "additionalProperties"),
    ],
)
def test_a_broken_rule_is_named_with_its_path(input, path, rule):
    code, message = refusal(CHART, json.dumps(input))
    assert code == "INVALID_INPUT"
    assert f"at {path}:" in message
    assert f"(rule: {rule})" in message


def test_error_message_is_short_for_long_input():
    _, message = refusal(CHART, json.dumps({"title": "t", "series": ["x" * 50_000]}))
    assert len(message) <= 1000


def nested(levels: int) -> dict[str, Any]:
    return {"items": nested(levels - 1)} if levels else {}


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": nested(300)}},
        {"$ref": "https://schemas.example/remote.json"},
        {"$ref": "file:///etc/hostname"},
        {"$ref": "#/$defs/missing"},
        {"type": "nothing"},
        {"properties": {"a": {"pattern": "("}}, "type": "object"},
        {"properties": {"a": {"pattern": "^(?=b)"}}},
    ],
)
def test_invalid_schema_is_a_tool_error(schema):
    code, message = refusal(http_tool("", input_schema=schema), '{"a": "b"}')
    assert code == "TOOL_ERROR"
    assert "lookup" in message
    with pytest.raises(ValueError, match=r"^(At|The input schema's type) "):
        check_schema(schema)


# Matched by backtracking, the first pattern takes 2 ** 60 steps, and stopped every run of the process.
LONG = 1024 * 1024
BACKTRACKS = {"type": "string", "pattern": "^(a+)+$"}
OPTIONAL_LIST = {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]}


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("schema", "input", "path", "rule"),
    [
        ({"properties": {"a": BACKTRACKS}}, {"a": "a" * 60 + "!"}, "a", "pattern"),
        ({"properties": {"a": BACKTRACKS}}, {"a": "a" * LONG + "!"}, "a", "pattern"),
        ({"properties": {"a": {"items": BACKTRACKS}}}, {"a": ["aaa", "a" * LONG + "!"]}, "a.1", "pattern"),
        ({"propertyNames": BACKTRACKS}, {"a" * LONG + "!": 1}, "the top level", "propertyNames"),
        (
            {"patternProperties": {"^(a+)+$": False}, "required": ["x"]},
            {"a" * LONG + "!": 1},
            "the top level",
            "required",
        ),
        ({"properties": {"a": {"format": "regex", "minLength": LONG}}}, {"a": "(" * (LONG - 1)}, "a", "minLength"),
        ({"properties": {"a": {"minLength": 10**15}}}, {"a": "x" * LONG}, "a", "minLength"),
        (
            {"properties": {"a": {"uniqueItems": True}}},
            {"a": [{"i": [i]} for i in range(15_000)] + [{"i": [0]}]},
            "a",
            "uniqueItems",
        ),
        ({"properties": {"a": OPTIONAL_LIST}}, {"a": [1] * 45_000}, "a", "anyOf"),
        ({"additionalProperties": False}, {f"k{i}": 0 for i in range(45_000)}, "the top level", "falseSchema"),
    ],
)
def test_the_worst_input_is_refused_in_a_moment(monkeypatch, schema, input, path, rule):
    monkeypatch.setattr("runs.tools.schema.TOOL_INPUT_MAX_CHARS", 2 * LONG)
    monkeypatch.setattr("runs.tools.schema.TOOL_CHECK_SECONDS", 20)
    code, message = refusal(http_tool("", input_schema=schema), json.dumps(input))
    assert code == "INVALID_INPUT"
    assert f"at {path}:" in message
    assert message.endswith(f"(rule: {rule})")


def halves(*, levels: int) -> dict[str, Any]:
    """A small schema whose check doubles its time with each level."""
    parts = {f"p{level}": {"allOf": [{"$ref": f"#/$defs/p{level - 1}"}] * 2} for level in range(1, levels + 1)}
    return {"$defs": parts | {"p0": {}}, "properties": {"a": {"$ref": f"#/$defs/p{levels}"}}}


def within_each_other(*, levels: int) -> dict[str, Any]:
    part: dict[str, Any] = {"properties": {"x": True}}
    for _ in range(levels):
        part = {"allOf": [part], "unevaluatedProperties": False}
    return {"properties": {"a": part}}


LETTERS = "".join(random.Random(1).choices("ab", k=199_980))
EXPLOSIONS = [
    (halves(levels=40), {"a": 1}),
    (within_each_other(levels=40), {"a": {"x": 1}}),
    ({"properties": {"a": {"pattern": "^[ab]*a[ab]{900}$"}}}, {"a": LETTERS}),
    ({"properties": {"a": {"items": {"enum": [*({"a": n} for n in range(9_000)), 0]}}}}, {"a": [0] * 45_000}),
]


@pytest.mark.timeout(20)
@pytest.mark.parametrize(("schema", "input"), EXPLOSIONS)
def test_a_check_that_takes_too_long_is_ended(monkeypatch, schema, input):
    """Without the limit, these take from a second to years, with Python's lock held."""
    monkeypatch.setattr("runs.tools.schema.TOOL_CHECK_SECONDS", 0.1)
    begun = time.process_time()
    code, message = refusal(http_tool("", input_schema=schema), json.dumps(input))
    assert (code, "takes too long" in message) == ("INVALID_INPUT", True)
    assert time.process_time() - begun < 0.5
    assert parse_input(CHART, '{"title": "t", "series": [1]}')  # the next check has a process


NODES = {"properties": {"nodes": {"items": {"$ref": "#/$defs/node"}}}}
EXPRESSION = {"anyOf": [NODES | {"required": [kind]} for kind in ("and", "or", "xor")]}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("node", [EXPRESSION, {"allOf": [NODES, NODES], "required": ["or"]}])
def test_deep_input_for_a_recursive_schema_is_refused_in_a_moment(node):
    """The errors of all alternatives are as many as the alternatives to the power of the depth."""
    tool = http_tool("", input_schema={"$defs": {"node": node}, "properties": {"a": {"$ref": "#/$defs/node"}}})
    for depth in (3, 31):
        value: dict[str, Any] = {}
        for _ in range(depth):
            value = {"nodes": [value], "or": 1}
        code, message = refusal(tool, json.dumps({"a": value}))
        assert (code, "rule: " in message) == ("INVALID_INPUT", depth == 3)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_remote_schema_is_not_fetched(server):
    server.answers({"type": "object"})
    assert refusal(http_tool("", input_schema={"$ref": f"{server.url}/schema.json"}), "{}")[0] == "TOOL_ERROR"
    assert server.received == []


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "array"}, "must be object"),
        ({"type": "object", "properties": {"a": {"type": "nothing"}}}, "properties.a.type"),
        ({"type": "object", "required": "a"}, "required"),
        ({"properties": {"a": {"pattern": "^(?=x)"}}}, r"properties\.a\.pattern: .*\^\(\?=x\)"),
        ({"properties": {"a": {"pattern": r"(x)\1"}}}, r"properties\.a\.pattern: .*\(x\)"),
        ({"properties": {"a": {"pattern": "("}}}, r"properties\.a\.pattern: .*\("),
        ({"patternProperties": {"^(?!x)": {}}}, r"patternProperties.*: .*\^\(\?!x\)"),
        ({"propertyNames": {"pattern": "(?<=x)y"}}, r"propertyNames\.pattern: .*\(\?<=x\)y"),
        ({"properties": {"a": {"pattern": "(x{1000}){1000}"}}}, r"properties\.a\.pattern: .*\(x\{1000\}\)"),
        ({"properties": {"a": {"$ref": "https://schemas.example/remote.json"}}}, "schemas.example"),
        ({"properties": {"a": {"$ref": "#/$defs/missing"}}}, "missing"),
    ],
)
def test_invalid_schema_is_refused_when_staff_enter_it(schema, named):
    with pytest.raises(ValueError, match=named):
        check_schema(schema)


def test_valid_schema_is_accepted():
    check_schema(CHART.input_schema)
    check_schema({})


def test_schema_of_an_older_draft_is_accepted():
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", "definitions": {"x": {"type": "string"}}}
    schema |= {"properties": {"a": {"$ref": "#/definitions/x"}}}
    check_schema(schema)
    assert refusal(http_tool("", input_schema=schema), '{"a": 1}') == (
        "INVALID_INPUT",
        'The input does not fit: at a: 1 is not of type "string" (rule: type)',
    )


def test_schema_that_refers_to_itself_is_accepted():
    schema = {"properties": {"name": {"type": "string"}, "children": {"items": {"$ref": "#"}}}}
    check_schema(schema)
    assert parse_input(http_tool("", input_schema=schema), '{"children": [{"name": "x"}]}')
    assert "at children.0.name:" in refusal(http_tool("", input_schema=schema), '{"children": [{"name": 1}]}')[1]


def test_a_schema_that_takes_too_long_is_refused():
    with pytest.raises(ValueError, match="takes too long"):
        check_schema(halves(levels=40) | {"$ref": "#/$defs/p40"})


def test_one_schema_of_a_user_is_checked_at_a_time():
    refused: list[tuple[int, str]] = []
    check_schema({})

    def check_as(user_id: int, field: str) -> None:
        with contextlib.suppress(RateLimited), one_check_of(user_id, {field: []}):
            return
        refused.append((user_id, field))

    with one_check_of(1):
        for user_id, field in ((1, "clientTools"), (2, "clientTools"), (1, "message")):
            thread = Thread(target=check_as, args=(user_id, field))
            thread.start()
            thread.join()
    check_as(1, "clientTools")
    assert refused == [(1, "clientTools")]
