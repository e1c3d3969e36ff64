"""Tests of the HTTP tools that staff add, against a real server."""

import dataclasses
import gzip
import json
from base64 import b64encode

import pytest
from django.core.files.storage import default_storage
from django.test import override_settings
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from runs.tools.base import ToolDefinition, ToolFailure, ToolResult, parse_headers, parse_signing_secret
from runs.tools.files import stored_image
from tests.tools.conftest import http_tool


def failure(call, *args):
    with pytest.raises(ToolFailure) as caught:
        call(*args)
    return caught.value


def test_request_contains_ids_input_and_secret(call, server):
    server.answers({"result": "42"})
    tool = http_tool(f"{server.url}/lookup?v=1", secret_headers={"Authorization": "Bearer sesame"})
    result = call(tool, {"query": "Größe", "nested": {"a": [1, 2.5, None]}})
    assert (result.text, result.urls, result.credit_used) == ("42", (), None)
    (received,) = server.received
    assert (received.method, received.path) == ("POST", "/lookup?v=1")
    assert received.json == {
        "invocationId": "inv_1",
        "runId": "run_1",
        "chatId": "chat_1",
        "userId": "ada",
        "input": {"query": "Größe", "nested": {"a": [1, 2.5, None]}},
    }
    assert received.headers["Idempotency-Key"] == "inv_1"
    assert received.headers["Content-Type"] == "application/json"
    assert received.headers["Authorization"] == "Bearer sesame"
    assert not [name for name in received.headers if name.lower().startswith("webhook-")]


@pytest.mark.parametrize("prefix", ["", "whsec_"])
def test_a_signed_request_passes_the_library_of_the_specification(call, server, prefix):
    secret = prefix + b64encode(b"x" * 32).decode()
    server.answers({"result": "42"})
    tool = http_tool(server.url, signing_secret=parse_signing_secret(secret))
    assert call(tool, {"q": "Größe"}).text == "42"
    (received,) = server.received
    assert Webhook(secret).verify(received.body, received.headers)["input"] == {"q": "Größe"}
    assert received.headers["webhook-id"] == "inv_1"
    with pytest.raises(WebhookVerificationError):
        Webhook(b64encode(b"y" * 32).decode()).verify(received.body, received.headers)
    assert secret.removeprefix("whsec_") not in repr(tool)


@pytest.mark.parametrize("secret", ["sesame!", "whsec_", "c2VzYW1", "c2Vz\nYW1l"])
def test_a_signing_secret_is_base64_and_an_error_does_not_contain_it(secret):
    with pytest.raises(ValueError, match="base64") as refusal:
        parse_signing_secret(secret)
    assert secret == "whsec_" or secret not in str(refusal.value)
    assert parse_signing_secret(None) == parse_signing_secret("") == ""


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ("plain", "plain"),
        ("", ""),
        (None, "null"),
        ({"price": 0.1, "n": [1, True]}, '{"price":0.1,"n":[1,true]}'),
        ("a\x00b", "ab"),
    ],
)
def test_result_is_text_or_json(call, server, result, text):
    server.answers({"result": result})
    assert call(http_tool(server.url), {}).text == text


def test_numbers_of_a_result_keep_every_digit(call, server):
    server.answers(b'{"result": {"amount": 0.12345678901234567890123}}')
    assert call(http_tool(server.url), {}).text == '{"amount":0.12345678901234567890123}'


def test_a_lone_surrogate_in_a_result_is_replaced(call, server):
    server.answers(b'{"result": "a\\ud800b"}')
    assert call(http_tool(server.url), {}).text == "a\ufffdb"


def test_result_urls_and_credit_used_are_passed_on(call, server):
    server.answers(b'{"result": "ok", "resultUrls": ["https://files.example/1"], "creditUsed": 0.250001}')
    result = call(http_tool(server.url), {})
    assert result.urls == ("https://files.example/1",)
    assert result.credit_used == 250_001


@pytest.mark.parametrize(
    ("credits", "micro"),
    [
        (b"0", 0),
        (b"2", 2_000_000),
        (b"2.1", 2_000_000),
        (b"1e300", 2_000_000),
        (b"0.30000000000000004", 300_000),
        (b"0.0000005", 1),
        (b"null", None),
    ],
)
def test_credit_used_is_converted_to_micro_credits_and_limited_to_the_price(call, server, credits, micro):
    server.answers(b'{"result": "ok", "creditUsed": ' + credits + b"}")
    assert call(http_tool(server.url, price=2_000_000), {}).credit_used == micro


@pytest.mark.parametrize(
    "answer",
    [
        b'{"result": "ok", "creditUsed": -0.1}',
        b'{"result": "ok", "creditUsed": -0.0000001}',
        b'{"result": "ok", "creditUsed": "1"}',
        b'{"result": "ok", "creditUsed": true}',
        b'{"result": "ok", "resultUrls": "https://files.example/"}',
        b'{"result": "ok", "resultUrls": [1]}',
        b'{"result": "ok", "resultUrls": ["javascript:alert(1)"]}',
        b'{"result": "ok", "resultUrls": ["/relative"]}',
        b'{"result": "ok", "resultUrls": ["https://files.example/a b"]}',
        b'{"result": "ok", "resultUrls": ["https://[::1/"]}',
        b'{"result": "ok", "resultUrls": ["https://files.example/' + b"x" * 2048 + b'"]}',
        json.dumps({"result": "ok", "resultUrls": ["https://files.example/"] * 51}).encode(),
    ],
)
def test_a_malformed_object_with_a_result_is_a_tool_error(call, server, answer):
    server.answers(answer)
    assert failure(call, http_tool(server.url), {}).code == "TOOL_ERROR"


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (b"", ""),
        (b"Sunny, 21 \xc2\xb0C", "Sunny, 21 °C"),
        (b"<html>", "<html>"),
        (b"[]", "[]"),
        (b'"ok"', "ok"),
        (b"{}", "{}"),
        (b'{"temperature": 21.50, "wind": null}', '{"temperature":21.50,"wind":null}'),
        (b"21", "21"),
        (b"null", "null"),
        (b'{"result": "ok"', '{"result": "ok"'),
        (b'{"result": NaN}', '{"result": NaN}'),
        (b'{"result": 1, "creditUsed": 1e99999999999999999999}', '{"result": 1, "creditUsed": 1e99999999999999999999}'),
        (b"\xff\xfe\xfd", "[application/json, which is not text]"),
        (b"[" * 1000, "[" * 1000),
        (b"[" * 100_000, "[" * 100_000),
    ],
)
@pytest.mark.parametrize("status", [200, 201, 299])
def test_any_other_answer_is_the_result_itself(call, server, answer, text, status):
    server.status = status
    server.answers(answer)
    assert call(http_tool(server.url), {}) == ToolResult(text)


@pytest.mark.parametrize(
    ("kind", "body", "text"),
    [
        ("text/plain; charset=latin-1", b"Gr\xf6\xdfe", "Größe"),
        ('text/plain; charset="iso-8859-1"', b"Gr\xf6\xdfe", "Größe"),
        ("text/plain; charset=none", b"Gr\xf6\xdfe", "[text/plain, which is not text]"),
        # A codec of Python alone. Some of those need time that grows with the square of a body.
        ("text/plain; charset=unicode_escape", b"Gr\xf6\xdfe", "[text/plain, which is not text]"),
        ("text/plain; charset=utf-8", b"Gr\xf6\xdfe", "[text/plain, which is not text]"),
        ("", b"\xff", "[bytes, which is not text]"),
        ("application/pdf", b"%PDF\xff", "[application/pdf, which is not text]"),
    ],
)
def test_text_has_the_charset_of_the_answer(call, server, kind, body, text):
    server.headers = {"Content-Type": kind}
    server.answers(body)
    assert call(http_tool(server.url), {}).text == text


@pytest.mark.parametrize("status", [199 + 103, 400, 404, 500, 503])
def test_status_other_than_2xx_is_a_tool_error_and_redirects_are_not_followed(call, server, status):
    server.status = status
    server.headers = {"Location": f"{server.url}/elsewhere"}
    server.answers(("€" * 299 + "12").encode())
    caught = failure(call, http_tool(server.url), {})
    assert caught.code == "TOOL_ERROR"
    assert caught.message == f"lookup answered with HTTP status {status}: {'€' * 299}1"
    assert len(server.received) == 1


@pytest.mark.parametrize("before", [0, 200, 290, 1190])
def test_the_body_of_an_error_shows_no_secret(call, server, before):
    """Some servers answer with the request that they got. The secret may stand where the text is cut."""
    headers = {"Authorization": 'Bearer ses"ame-0123456789', "X-Key": "0123456789ab"}
    tool = http_tool(server.url, secret_headers=headers, signing_secret=b64encode(b"signing" * 4).decode())
    server.status = 400
    for shown in (headers, "Bearer ses'ame".replace("'", '"') + "-0123456789 0123456789ab", tool.signing_secret):
        server.answers(("x" * before).encode() + json.dumps(shown).encode())
        message = failure(call, tool, {}).message
        assert not any(part in message for part in ("ses", "ame-", "0123", tool.signing_secret[:9]))


def test_an_answer_over_the_limit_is_a_tool_error(call, server):
    with override_settings(TOOL_ANSWER_MAX_BYTES=2000):
        server.answers({"result": "x" * (2000 - 14)})
        assert len(call(http_tool(server.url), {}).text) == 1986
        server.answers({"result": "x" * (2000 - 13)})
        caught = failure(call, http_tool(server.url), {})
    assert (caught.code, "2000 bytes" in caught.message) == ("TOOL_ERROR", True)


def test_a_compressed_answer_is_a_tool_error(call, server):
    """Not a result that costs the price: the model could not read it."""
    server.headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    server.answers(gzip.compress(b'{"result": "x"}'))
    assert failure(call, http_tool(server.url), {}).code == "TOOL_ERROR"


def test_an_answer_of_too_many_values_is_read_as_text(call, server):
    server.answers({"result": [0] * 100_001})
    assert call(http_tool(server.url), {}).text.startswith('{"result": [0, 0')
    server.answers({"result": "[0]," * 100_000})
    assert call(http_tool(server.url), {}).text.startswith("[0],")


def test_text_over_the_limit_is_truncated_with_a_note(call, server, monkeypatch):
    monkeypatch.setattr("runs.tools.base.TOOL_RESULT_MAX_CHARS", 200)
    server.answers({"result": "x" * 500})
    text = call(http_tool(server.url), {}).text
    assert len(text) == 200
    assert text.startswith("xxx")
    assert "500 characters" in text


def test_private_address_is_refused_without_a_request(call, server):
    with override_settings(OUTBOUND_ALLOW_PRIVATE=False):
        caught = failure(call, http_tool(server.url), {})
    assert caught.code == "TOOL_ERROR"
    assert "not public" in caught.message
    assert server.received == []


@pytest.mark.parametrize("url", ["", "ftp://example.com/", "http://", "http://user:password@127.0.0.1/", "http://[::1"])
def test_a_bad_url_is_a_tool_error(call, url):
    assert failure(call, http_tool(url), {}).code == "TOOL_ERROR"


def test_a_refused_connection_is_a_tool_error(call):
    caught = failure(call, http_tool("http://127.0.0.1:1/"), {})
    assert caught.code == "TOOL_ERROR"
    assert "refused" in caught.message


def test_a_slow_answer_is_a_time_out(call, server, context):
    server.hold = True
    caught = failure(call, http_tool(server.url, timeout_seconds=0.2), {})
    assert caught.code == "TOOL_TIMEOUT"
    caught = failure(call, http_tool(server.url), {}, dataclasses.replace(context, timeout_seconds=0.2))
    assert caught.code == "TOOL_TIMEOUT"


def test_secret_headers_are_not_logged():
    assert "sesame" not in repr(http_tool("https://example.com", secret_headers={"Authorization": "sesame"}))


def test_secret_headers_are_read_from_a_json_object():
    assert parse_headers('{"Authorization": "Bearer a b", "X-Key": "k"}') == {
        "Authorization": "Bearer a b",
        "X-Key": "k",
    }
    assert parse_headers(None) == parse_headers("") == {}


@pytest.mark.parametrize(
    "text",
    [
        "sesame",
        '["sesame"]',
        '{"Authorization": 1}',
        '{"Authorization": ""}',
        '{"Authorization": "sesame\\r\\nX-Other: 1"}',
        '{"Authorization": "sesäme"}',
        '{"Author ization": "sesame"}',
        '{"": "sesame"}',
        '{"Host": "sesame"}',
        '{"content-length": "sesame"}',
        '{"Idempotency-Key": "sesame"}',
        '{"Webhook-Signature": "sesame"}',
    ],
)
def test_error_about_invalid_secret_headers_does_not_contain_them(text):
    with pytest.raises(ValueError, match="header") as refusal:
        parse_headers(text)
    assert "sesame" not in str(refusal.value)


def test_a_definition_is_a_snapshot_of_its_row():
    class Row:
        name, display_name, description, node_type = "lookup", "Look up", "Looks up.", "http"
        input_schema, price, approval, timeout_seconds, repeatable = {}, 5, "always", 3.0, True
        url, secret_headers, remote_name = "https://example.com/", '{"X-Key": "k"}', ""
        signing_secret = "whsec_a2V5"
        park_seconds, cancel_url, unsigned_callbacks = 600, "", False

    definition = ToolDefinition.from_row(Row())
    assert definition.secret_headers == {"X-Key": "k"}
    assert definition.signing_secret == "a2V5"
    assert (definition.price, definition.approval, definition.timeout_seconds) == (5, "always", 3.0)


PNG = b"\x89PNG\r\n\x1a\nimage"


def test_an_image_is_stored(call, server):
    server.answers(PNG)
    server.headers = {"Content-Type": "image/png"}
    result = call(http_tool(server.url), {})
    (url,) = result.urls
    stored_name, name, _ = stored_image("inv_1", url)
    assert (result.text, name) == ("[image-1.png]", "image-1.png")
    assert default_storage.open(stored_name).read() == PNG


def test_an_image_that_the_storage_refuses_is_a_note(call, server, monkeypatch):
    monkeypatch.setattr(default_storage, "save", lambda *args: (_ for _ in ()).throw(OSError))
    server.answers(PNG)
    server.headers = {"Content-Type": "image/png"}
    assert call(http_tool(server.url), {}) == ToolResult("[image-1.png, which could not be stored]")


def test_other_bytes_are_no_image(call, server):
    server.answers(b"\xff<html>")
    server.headers = {"Content-Type": "image/png"}
    assert call(http_tool(server.url), {}) == ToolResult("[image/png, which is not text]")


@pytest.mark.parametrize(
    "url",
    [
        "https://agents.example/files/" + "0" * 64 + "/image-1.png",
        "https://elsewhere.example/files/{token}/image-1.png",
        "https://agents.example/files/{token}/image-1.svg",
        "https://agents.example/files/{token}/image-2.png",
        "image-1.png",
        "",
    ],
)
def test_the_images_of_others_are_not_the_calls_own(call, server, url):
    """A tool cannot show the file of another call to the model, or have it deleted."""
    server.answers(PNG)
    server.headers = {"Content-Type": "image/png"}
    token = call(http_tool(server.url), {}).urls[0].split("/")[-2]
    assert stored_image("inv_1", url.format(token=token)) is None
