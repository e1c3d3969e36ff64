"""Tests of the input of calls: valid input is passed on unchanged, other input is refused with path and rule."""

import json

import pytest

from runs.tools.base import ToolFailure
from runs.tools.schema import check_schema, parse_input
from tests.tools.conftest import builtin, http_tool

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
        ("[" * 100_000, "more than 64 levels deep"),
    ],
)
def test_invalid_json_object_is_refused(arguments, named):
    code, message = refusal(http_tool(""), arguments)
    assert code == "INVALID_INPUT"
    assert named in message


def test_depth_at_the_limit_is_accepted():
    arguments = '{"a": ' * 64 + "1" + "}" * 64
    assert json.dumps(parse_input(http_tool(""), arguments)) == arguments


def test_input_that_is_too_long_is_refused(settings):
    settings.TOOL_INPUT_MAX_CHARS = 100
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


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": "https://schemas.example/remote.json"},
        {"$ref": "#/$defs/missing"},
        {"type": "nothing"},
        {"properties": {"a": {"pattern": "("}}, "type": "object"},
    ],
)
def test_invalid_schema_is_a_tool_error(schema):
    code, message = refusal(http_tool("", input_schema=schema), '{"a": "b"}')
    assert code == "TOOL_ERROR"
    assert "lookup" in message


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_remote_schema_is_not_fetched(server):
    server.answers({"type": "object"})
    assert refusal(http_tool("", input_schema={"$ref": f"{server.url}/schema.json"}), "{}")[0] == "TOOL_ERROR"
    assert server.received == []


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ([], "JSON object"),
        ({"type": "array"}, "must be object"),
        ({"type": "object", "properties": {"a": {"type": "nothing"}}}, "properties.a.type"),
        ({"type": "object", "required": "a"}, "required"),
    ],
)
def test_invalid_schema_is_refused_when_staff_enter_it(schema, named):
    with pytest.raises(ValueError, match=named):
        check_schema(schema)


def test_valid_schema_is_accepted():
    check_schema(CHART.input_schema)
    check_schema({})
