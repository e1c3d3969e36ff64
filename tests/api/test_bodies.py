"""Reading and writing JSON bodies (docs/api.md)."""

import json
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from config.kernel.jsontext import MalformedJSON, dumps, parse_value
from tests.tiers import examples

pytestmark = [pytest.mark.django_db, pytest.mark.urls("tests.api.urls")]
PATH = "/api/v1/groups"


def put(session, raw: bytes | str, content_type: str = "application/json", **extra):
    return session.generic("PUT", PATH, raw, content_type=content_type, **extra)


def code(response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


@pytest.mark.parametrize(
    "raw",
    [
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"1",
        b" ",
        b"{} {}",
        b"{'a': 1}",
        b'{"a": 1,}',
        b'{"a": 1, "a": 2}',
        b'{"a": {"b": 1, "b": 1}}',
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": -Infinity}',
        b'{"a": 1e99999999999999999999}',
        b'{"a": "\xff"}',
        b'{"a": "\xed\xa0\x80"}',
        b'\xef\xbb\xbf{"a": 1}',
        b'{"a": "\\ud800"}',
        b'{"a": ["\\udc00\\ud800"]}',
        b'{"\\ud800": 1}',
        b'{"a": "\\u0000"}',
        b'{"a": {"\\u0000": 1}}',
        b'{"a": "\x00"}',
        b'{"a": [' + b"0," * 50_000 + b"0]}",
        b'{"a": [' + b'"",' * 300_000 + b"0]}",
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a": 1e309}',
        b'{"a": 1e-999999999}',
        b'{"a": 0.' + b"1" * 5000 + b"}",
        b'{"a": ' + b"[" * 64 + b"]" * 64 + b"}",
        b"[" * 500_000,
        b'{"a":' * 100_000,
    ],
    ids=lambda raw: repr(raw[:24]),
)
def test_invalid_json_is_400(session, raw):
    assert code(put(session, raw)) == (400, "VALIDATION_ERROR")
    assert code(session.generic("POST", "/api/v1/api-keys", raw, content_type="application/json")) == (
        400,
        "VALIDATION_ERROR",
    )


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a":9223372036854775807}',
        b'{"a":-' + b"9" * 999 + b"}",
        b'{"a":[' + b'"[,{\\",\\\\",' * 20_000 + b"0]}",
        b'{"a":0.1234567890123456789012345678901234567890}',
        b'{"a":0.10}',
        b'{"a":[true,false,null,"\xc3\xbc \xf0\x9f\x98\x80"]}',
        b'{"snake_case":{"camelCase":{"":1}}}',
        b'{"a":' + b"[" * 63 + b"]" * 63 + b"}",
        b'{"' + b"[" * 1000 + b'":"' + b'{\\"' * 1000 + b'"}',
    ],
    ids=lambda raw: repr(raw[:24]),
)
def test_json_values_are_returned_exactly(session, raw):
    response = put(session, raw)
    assert response.status_code == 200
    assert response.content == raw


def test_escapes_are_decoded(session):
    assert put(session, b'{"\\u00fc": "\\ud83d\\ude00\\n"}').content == '{"ü":"😀\\n"}'.encode()


@pytest.mark.parametrize(("raw", "text"), [(b"1e3", b"1000"), (b"1.5E-7", b"0.00000015"), (b"0e99999999", b"0")])
def test_numbers_are_written_without_an_exponent(session, raw, text):
    assert put(session, b'{"a":' + raw + b"}").content == b'{"a":' + text + b"}"


@pytest.mark.parametrize(("raw", "text"), [(b"1e31", b"1E+31"), (b"1.5e-300", b"1.5E-300")])
def test_numbers_of_great_length_are_written_with_an_exponent(session, raw, text):
    assert put(session, b'{"a":' + raw + b"}").content == b'{"a":' + text + b"}"


@pytest.mark.parametrize(
    "content_type",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "*/*", "application/*", "",
     "application/json; charset=latin-1", "application/json5", "application/json, text/plain", "json"],
)  # fmt: skip
def test_other_media_types_are_415(session, content_type):
    assert code(put(session, b"{}", content_type)) == (415, "UNSUPPORTED_MEDIA_TYPE")


@pytest.mark.parametrize(
    "content_type",
    ["application/json", "Application/JSON", "application/json; charset=UTF-8", 'application/json;charset="utf-8"'],
)
def test_json_media_types_are_accepted(session, content_type):
    assert put(session, b"{}", content_type).status_code == 200


@pytest.mark.parametrize("content_type", ["application/json", "", "application/x-www-form-urlencoded"])
def test_an_empty_body_is_an_empty_object(session, content_type):
    assert put(session, b"", content_type).json() == {}
    # So the error names each missing field.
    response = session.generic("POST", "/api/v1/api-keys", b"", content_type=content_type)
    assert "name" in response.json()["error"]["details"]["fields"]


def test_the_size_limit_is_exact(session, settings):
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 100
    body = b'{"a":"' + b"x" * 92 + b'"}'
    assert len(body) == 100
    assert put(session, body).status_code == 200
    assert code(put(session, body + b" ")) == (413, "PAYLOAD_TOO_LARGE")


def test_the_default_size_limit_is_one_mebibyte(session):
    assert code(put(session, b'{"a":"' + b"x" * 1024 * 1024 + b'"}')) == (413, "PAYLOAD_TOO_LARGE")


text = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"))
numbers = st.integers(-(2**63), 2**63 - 1) | st.decimals(-(10**9), 10**9, allow_nan=False, places=6)
json_values = st.recursive(
    st.none() | st.booleans() | numbers | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=20,
)


@given(json_values)
@hypothesis_settings(deadline=None, max_examples=examples(100))
def test_written_json_is_read_as_the_same_value(value):
    assert parse_value(dumps(value)) == value


@given(st.binary(max_size=60) | st.text(alphabet='{}[]",:\\u0 d8e1.-', max_size=60).map(str.encode))
@hypothesis_settings(deadline=None, max_examples=examples(300))
def test_any_bytes_give_a_value_or_a_parse_error(raw):
    try:
        value = parse_value(raw)
    except MalformedJSON:
        return
    json.loads(dumps(value), parse_float=Decimal)


@pytest.mark.parametrize("value", [Decimal("NaN"), Decimal("Infinity"), float("nan"), object()])
def test_values_that_json_cannot_express_are_an_error(value):
    with pytest.raises((ValueError, TypeError)):
        dumps({"a": value})


@pytest.mark.parametrize(
    "raw", [b'"\\' * 250_000 + b"[" * 65, b'{"a":"\\"' * 70_000, b"[" * 65 + b'"' + b"\\" * 400_000]
)
def test_an_unterminated_string_is_scanned_once(raw):
    """A scanner that restarted at each quote would exceed the time limit of the test."""
    with pytest.raises(MalformedJSON):
        parse_value(raw)


def fields(response) -> dict[str, list[str]]:
    assert code(response) == (400, "VALIDATION_ERROR")
    return response.json()["error"]["details"]["fields"]


def test_an_unknown_field_is_named_with_the_one_that_was_meant(session):
    body = {"titel": "x", "somethingElse": 1, "title": 5}
    assert fields(session.post("/api/v1/chats", body, format="json")) == {
        "title": ["Not a valid string."],
        "titel": ["Unknown field.", "Did you mean title?"],
        "somethingElse": ["Unknown field."],
    }


def test_many_long_unknown_fields_cost_little(session):
    many = {f"f{number}" + "x" * 40: 1 for number in range(15_000)}
    found = fields(session.post("/api/v1/chats", {"t" * 100_000: 1} | many, format="json"))
    assert len(found) == 20
    assert max(map(len, found)) == 100
