"""The worst inputs of everything that reads text from outside, each at its size limit (test_worst_inputs.py).

``PATTERNS`` has an entry for each regular expression, ``SCANNERS`` for what is written by hand or left to a library,
and ``ON_EVENT_LOOPS`` for what an event loop executes. An entry is a name and calls without arguments.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from django.conf import settings
from django.core.handlers.wsgi import get_path_info
from django.test import RequestFactory
from opentelemetry.propagate import extract
from rest_framework.negotiation import DefaultContentNegotiation
from rest_framework.request import Request

from apikeys import authentication as api_keys
from apikeys import keys
from chats import downloads, media
from chats.serializers import AttachmentInput
from config.api import authentication, idempotency, middleware, pagination, ratelimit, session_tokens
from config.api.negotiation import ExactJSONRenderer, check_media_type
from config.kernel.jsontext import parse_value
from config.outbound import addresses, urls
from config.outbound.client import Answer
from credits.export import CsvRenderer
from runs.catalogue import dialects, fields, rules, versions, yaml
from runs.llm import base as llm_base
from runs.llm import demo, measure, openai_responses, refusals, wire
from runs.llm.http import DOCUMENT_MAX_BYTES
from runs.mcp import protocol
from runs.mcp.tools import NewChatInput
from runs.metadata import METADATA_KEY
from runs.tools import base, files, schema
from runs.tools import http as http_tool
from runs.tools.base import ToolDefinition, ToolResult
from runs.tools.builtin import calculate, draw_chart, web_fetch
from runs.tools.mcp import transport as mcp_transport

Work = Callable[[], object]

KIB = 1024
# No server in front of the application accepts a longer header or path.
HEADER = 64 * KIB
BODY = settings.API_MAX_BODY_BYTES
ANSWER = settings.TOOL_ANSWER_MAX_BYTES
EVENT = wire.MODEL_EVENT_MAX_BYTES
OUTPUT = llm_base.MODEL_OUTPUT_MAX_CHARS
ARGUMENTS = schema.TOOL_INPUT_MAX_CHARS
DOCUMENT = DOCUMENT_MAX_BYTES
PROVIDER_MODEL = 200
SCRIPT = settings.MESSAGE_MAX_CHARS
# What a stream of a provider or a client brings at once, at most.
CHUNK = 384 * KIB
# Fits no pattern, so that a search goes back over what it has read.
TAIL = "\x7f"
OUR_TEXT = "reads our own text"
FIXED = "reads a fixed number of characters"


def filled(part: str, size: int) -> str:
    return part * (size // len(part))


def array(part: str, size: int) -> str:
    return f"[{filled(part, size - 2)[:-1]}]"


def each(read: Callable[[str], object], *texts: str) -> list[Work]:
    return [partial(read, text) for text in texts]


def around(read: Callable[[str], object], size: int, *parts: str, before: str = "", after: str = "") -> list[Work]:
    """Read each part, repeated up to the size."""
    return each(read, *(before + filled(part, size) + after for part in parts))


def a_request(header: str, value: str) -> Request:
    return Request(RequestFactory().get("/?a=1", headers={header: value}))


def bearer(header: str) -> None:
    authentication.SessionTokenAuthentication().authenticate(a_request("Authorization", header))


def retry_after(header: str) -> object:
    return refusals.retry_after({"Retry-After": header})


def variables(text: str) -> str:
    return fields.VARIABLE.sub("", text)


def content_type_of_page(value: str) -> None:
    web_fetch._text(Answer(200, {"content-type": value}, b"x", False))


JSON_PARTS = ("[],", "{},", "[[[[[[]]]]]],", "1.5,", "1e308,", '"",', '{"a":1},', '"\\u00e9",', "-1e-308,", "12,")
UNCLOSED = ('"\\', '"', "\\", '"a', "[]", '"":')

# --- regular expressions ---------------------------------------------------------------------------------------------

# By file and by the name of the pattern, or of the function that uses it.
PATTERNS: dict[str, list[Work] | str] = {
    "apikeys/authentication.py: shape": around(api_keys.ApiKeyAuthentication.shape.fullmatch, HEADER, keys.MARK),
    "apikeys/keys.py: _SHAPE": around(keys.is_well_formed, HEADER, "a", before=keys.MARK),
    "runs/mcp/tools.py: idempotency_key": around(
        lambda text: NewChatInput.validated({"idempotencyKey": text}), BODY, " ", after="\n\n"
    ),
    "chats/serializers.py: sha256": around(
        lambda text: AttachmentInput.validated({"fileName": "a", "contentType": "a/b", "sizeBytes": 1, "sha256": text}),
        BODY,
        "a",
    ),
    "chats/downloads.py: RANGE": [
        *around(lambda header: downloads.byte_range(header, 1), HEADER, " ", "1", before="bytes=", after=TAIL),
        *around(lambda header: downloads.byte_range(header, 1), HEADER, " ", before="bytes=1-2", after=TAIL),
    ],
    "chats/downloads.py: UNSAFE": around(downloads.content_disposition, 255, "/"),
    "chats/media.py: MEDIA_TYPE": around(media.media_type, HEADER, "a", before="a/"),
    "chats/media.py: _CHARSET": [
        work
        for before in ("a/b", "a/b;", "a/b;charset", "a/b;charset=", "a/b;charset=utf8")
        for work in around(media.media_type, HEADER, " ", before=before, after=TAIL)
    ],
    "chats/media.py: SIGNATURES": [lambda: media.inspect([b"%PDF" * KIB], "application/pdf")],
    "config/database/queries.py: _with_fixed_types": OUR_TEXT,
    "config/management/commands/document_settings.py: DESCRIBED": OUR_TEXT,
    "config/management/commands/document_settings.py: COMMENT": OUR_TEXT,
    "config/management/commands/document_settings.py: SECTION": OUR_TEXT,
    "config/database/writes.py: _cast": OUR_TEXT,
    "config/api/negotiation.py: _MEDIA_TYPE": [
        work
        for before in ("", ";", ";charset", ";charset=", ";charset=utf8", ";charset=utf8;")
        for work in around(check_media_type, HEADER, " ", "\t", before=f"application/json{before}", after=TAIL)
    ],
    "config/api/serializers.py: camel": OUR_TEXT,
    "config/api/middleware.py: REQUEST_ID": around(middleware.REQUEST_ID.fullmatch, HEADER, "a"),
    "config/api/openapi/extensions.py: map_serializer_field": OUR_TEXT,
    "config/api/pagination.py: CURSOR": around(pagination.decode_cursor, HEADER, "9", "a", before="1-"),
    "config/api/idempotency.py: KEY": around(idempotency.KEY.fullmatch, HEADER, " "),
    "config/api/authentication.py: _BEARER": [
        *around(bearer, HEADER, " ", before="bearer"),
        *around(bearer, HEADER, "a", "a=", "=", " ", before="bearer a", after=TAIL),
    ],
    "config/api/authentication.py: shape": around(
        authentication.SessionTokenAuthentication.shape.fullmatch, HEADER, ".", "a", before="eyJ"
    ),
    "config/env.py: postgres": OUR_TEXT,
    "config/urls.py: urlpatterns": FIXED,
    "runs/catalogue/versions.py: REFERENCE": around(versions.REFERENCE.fullmatch, BODY, "a", "a@1"),
    "runs/catalogue/rules.py: TOOL_NAME": around(rules.TOOL_NAME.fullmatch, BODY, "a"),
    "runs/catalogue/fields.py: VARIABLE": around(variables, BODY, "${", "$${", "$", "${}"),
    "runs/catalogue/entries.py: new": OUR_TEXT,
    "runs/catalogue/fields.py: _variable": FIXED,
    "runs/catalogue/yaml.py: NOT_A_NUMBER": around(yaml.NOT_A_NUMBER.fullmatch, BODY, "-", ".", ".inf", after=TAIL),
    "runs/catalogue/yaml.py: NUMBER": around(yaml.NUMBER.fullmatch, BODY, "1", "1.", ".1", "1e", after=TAIL),
    "runs/catalogue/dialects.py: CLAUDE": around(dialects.CLAUDE.search, PROVIDER_MODEL, "claude-", "claude-a-", "a-"),
    "runs/catalogue/dialects.py: NO_REASONING_WITH_TOOLS": around(
        dialects.NO_REASONING_WITH_TOOLS.search, PROVIDER_MODEL, "/gpt-6", "gpt-5.", "5"
    ),
    "runs/catalogue/dialects.py: REASONING_MODEL": around(
        dialects.REASONING_MODEL.search, PROVIDER_MODEL, "/gpt-5", "/o", "5"
    ),
    "runs/llm/openai_responses.py: PLAIN_MODEL": around(
        openai_responses.PLAIN_MODEL.search, PROVIDER_MODEL, "/gpt-5", "gpt-5.", "5"
    ),
    "runs/llm/openai_responses.py: REFUSES_ENCRYPTED": around(
        openai_responses.REFUSES_ENCRYPTED.search, EVENT, "encrypte", "inclu"
    ),
    "runs/llm/wire.py: ACCEPTED": around(wire.wire_name, OUTPUT, "a", "\u00e9"),
    "runs/llm/wire.py: ACCEPTED_ID": around(wire.wire_id, OUTPUT, "a", "\u00e9"),
    "runs/llm/wire.py: wire_name": around(wire.wire_name, OUTPUT, ".", "a."),
    "runs/llm/refusals.py: KEY_LIKE": around(
        lambda text: refusals.redacted(text, ("secret",)),
        EVENT,
        *("sk-", "//", "/", "//a", "key-a ", "Bearer ", "//aaaaaaa ", "a*", "***", "a-"),
    ),
    "runs/llm/refusals.py: retry_after": [
        work
        for before in ("", "Mon, 1 Jan 2026 ", "1 Jan ")
        for work in around(retry_after, HEADER, "0", " ", "(", "1 ", ":", "Mon, ", "0:", "\\", before=before)
    ],
    "runs/llm/refusals.py: stopped": around(
        lambda text: refusals.stopped({"code": text, "type": text}, ()), EVENT, "4", " "
    ),
    "runs/llm/wire.py: LONE_SURROGATE": around(wire.join_surrogates, EVENT // 6, "\ud800", "\udc00", "\udc00\ud800"),
    "runs/llm/demo.py: WORDS": around(lambda text: list(demo.WORDS.finditer(text)), SCRIPT, " ", "a", "a "),
    "runs/llm/demo.py: _read_line": [
        *around(demo.parse_script, SCRIPT, "1", "1.", before="/wait "),
        *around(demo.parse_script, SCRIPT, "1", "1 ", before="/stream "),
    ],
    "runs/llm/measure.py: EXPONENT": around(measure.EXPONENT.search, OUTPUT, "1", "e", "1 "),
    "runs/metadata.py: METADATA_KEY": around(METADATA_KEY.fullmatch, BODY, "a"),
    "runs/catalogue/imports.py: import_mcp": OUR_TEXT,
    "runs/catalogue/imports.py: _import": around(partial(re.sub, r"[^A-Za-z0-9_-]+", "_"), ANSWER, "a", " ", "a "),
    "runs/privacy/erase.py: _hide_in_log": OUR_TEXT,
    "runs/pages.py: read_page": OUR_TEXT,
    "runs/tools/base.py: _SURROGATE": around(base.clean_text, ANSWER, "\ud800", "a"),
    "runs/tools/base.py: is_web_address": around(base.is_web_address, ANSWER, "a", before="http://"),
    "runs/tools/base.py: parse_headers": [
        *around(lambda name: base.parse_headers(f'{{"{name}": "a"}}'), BODY, "a"),
        *around(lambda value: base.parse_headers(f'{{"a": "{value}"}}'), BODY, "a", " ", before="a"),
    ],
    "runs/tools/base.py: RESERVED_HEADERS": OUR_TEXT,
    "runs/tools/builtin/web_fetch.py: CHARSET": around(web_fetch.CHARSET.fullmatch, HEADER, "utf", "iso-8859-"),
    "runs/tools/builtin/web_fetch.py: META_CHARSET": around(
        lambda page: web_fetch.decode(page.encode(), None), ANSWER, "<meta", "<meta charset", "<meta charset='"
    ),
    "runs/tools/builtin/web_fetch.py: _BLOCKS": OUR_TEXT,
    "runs/tools/builtin/web_fetch.py: _MARKUP": around(
        web_fetch.page_text,
        ANSWER,
        *("<", "<a", "</", "<!", "<!--", "<!-- --", "<?", "<a>", "<p>", "<p", "</p>", "<a ", "<a/", "<A"),
        *("<script", "<script>", "<script/>", "<script ", "<script/", "<script></scripts>", "<svg></svg>", "</script"),
    ),
    "runs/tools/builtin/web_fetch.py: _BLANKS": around(
        web_fetch.tidy, ANSWER, " ", "\n", " \n", "a\n", "\u2028", "\t "
    ),
    "runs/tools/builtin/draw_chart.py: _NOT_XML": around(
        lambda title: draw_chart.draw(title, [1e15, -1e15, 5e-324] * 333), draw_chart.TITLE_MAX_CHARS, "\x00", "<"
    ),
    "runs/tools/files.py: TOKEN_PATTERN": around(files.TOKEN_PATTERN.fullmatch, HEADER, "a"),
    "runs/tools/files.py: FILE_NAME_PATTERN": around(files.is_file_name, HEADER, "a", " ", "a "),
}

# --- other scanners and parsers --------------------------------------------------------------------------------------

TOOL = ToolDefinition("tool", "Tool", "", "http", {}, 1)


def negotiated(accept: str) -> object:
    renderers = [ExactJSONRenderer(), CsvRenderer()]
    return DefaultContentNegotiation().select_renderer(a_request("Accept", accept), renderers)


def tool_result(value: str) -> ToolResult:
    body = f'{{"result": {value}}}'.encode()
    return base.clean_result(http_tool._result(TOOL, Answer(200, {}, body, False)))


def traced(value: str) -> object:
    return extract({"traceparent": value, "tracestate": value, "baggage": value})


EXPRESSIONS = (
    *("9**" * 333 + "9", "(" * 199 + "9" + ")" * 199, "-" * 999 + "1", "+".join(["1/7"] * 240), "sqrt(" * 90 + "2"),
    *("9" * 999 + "**.5", "9" * 990 + "//7", "1." + "0" * 990 + "1**3", "round(" + "9" * 900 + "/7,100)", "9**9**9**9"),
    *("*".join(f"1/{10**7 + number}" for number in range(90)), "+".join(f"1/{10**7 + n}" for n in range(1, 180, 2))),
    *("(1+1/10**999)**0.123456789", "(10**999)**0.999", "1**10**999", "(-1)**10**999", "max(" + "1," * 490 + "1)"),
    *(
        "lambda:" * 140 + "1",
        "not " * 249 + "1",
        "[" * 999,
        "f" * 999,
        "factorial(999999)",
        "1e999999999",
        "0x" + "f" * 990,
    ),
)

SCANNERS: dict[str, list[Work]] = {
    "JSON of a body": [
        *around(parse_value, BODY, *UNCLOSED),
        *around(parse_value, BODY, *UNCLOSED, before="[" * 65),
        *[partial(parse_value, array(part, BODY).encode()) for part in JSON_PARTS],
        *around(parse_value, BODY, "[", "1", "1.5e", "\\ud800", before='["\\u00e9', after='"]'),
        *[partial(parse_value, text) for text in ("1." + filled("0", BODY) + "1", filled("9", BODY))],
    ],
    "Authorization": [
        *each(session_tokens.verify, filled(".", 16 * KIB), "e30." * 4 * KIB),
        *[
            partial(session_tokens.verify, base64.urlsafe_b64encode(filled(part, 12 * KIB).encode()).decode() + ".e30.")
            for part in ("[", '{"alg":', "9", '{"":')
        ],
    ],
    "names and addresses in tokens": [
        *around(authentication.username_of, 16 * KIB, "a", "\u00e4", " "),
        *each(authentication.email_of, "a@" + "a." * 124, '"' + "\\" * 240 + '"@a.b', "a." * 120 + "@a.b", "@" * 254),
    ],
    "If-None-Match": around(lambda tags: downloads._names(tags, '"a"'), HEADER, ",", "W/", '"a",'),
    "X-Forwarded-For": around(
        lambda hops: ratelimit.address_of(a_request("X-Forwarded-For", hops).META),
        HEADER,
        *(",", "1:", "1.", "[", "1", ":", "::1%", "1.1.1.1, "),
    ),
    "Accept": [
        *around(negotiated, HEADER, "a/a,", "*/*;q=0.1,", "a;", ";", ",", "application/json;a=b,"),
        *around(negotiated, HEADER, ";", "\\", before='a/a;x="'),
    ],
    "traceparent": around(traced, HEADER, "00-", " ", "a=b,", ";", "\t,"),
    "values of an MCP answer": around(
        lambda text: mcp_transport.count_values(text.encode()), ANSWER, *UNCLOSED, '"",', "1,", '"\n,', '\\",', "\r,"
    ),
    "headers of MCP": around(protocol.decode_header, HEADER, "=", "a", before="=?base64?", after="?="),
    "path": around(lambda path: get_path_info({"PATH_INFO": path}), HEADER, "\xff", "\u00c3", "%"),
    "calculate": each(calculate.evaluate, *(expression[:1000] for expression in EXPRESSIONS)),
    "character references of a page": around(
        web_fetch.page_text,
        ANSWER,
        "&",
        "&a",
        "&ab;",
        "&#1",
        "&lt",
        "&amp;",
        "&#x10ffff;",
        "&" + "a" * 32,
        "&#" + "9" * 4000,
    ),
    "charset of a page": [
        partial(web_fetch.decode, sign * (ANSWER // len(sign)), charset)
        for charset in ("utf-7", "utf-16", "utf-32", "gb18030", "shift_jis", "euc-kr", "big5", "latin-1", "punycode")
        for sign in (b"\xff", b"+", b"\xd8\x00", b"\x81\x30")
    ],
    "content type of a page": around(
        content_type_of_page, HEADER, ";", '\\"', '"', "a=", "a*0*=", "=", before='text/html; a="'
    ),
    "result of an HTTP tool": [
        *[partial(tool_result, array(part, ANSWER - 20)) for part in (*JSON_PARTS, "9" * 4300 + ",", "1e999999999,")],
        *[
            partial(tool_result, text)
            for text in (filled("[", ANSWER - 20), '"' + filled("\\u00e9", ANSWER - 40) + '"')
        ],
        partial(tool_result, '1, "creditUsed": 0.' + "0" * (ANSWER - 50) + "1"),
        partial(tool_result, '1, "creditUsed": 1e-999999999'),
    ],
    "host name": around(lambda host: addresses._getaddrinfo(host, 80), HEADER, "\u00e4", "\u00e4.", "\u0645", "xn--"),
}

# --- what event loops execute ----------------------------------------------------------------------------------------


def fed(*chunks: bytes) -> None:
    decoder = wire.SseDecoder()
    for chunk in chunks:
        decoder.feed(chunk)


def url_of(text: str) -> Any:
    return urls.parse(text, https_only=False)


ON_EVENT_LOOPS: dict[str, list[Work]] = {
    "chunk of a provider": [
        partial(fed, filled(part, CHUNK).encode())
        for part in (":\n", "\n", "data:\n", "data:{}\n\n", "data:{}\r\n\r\n", "a")
    ],
    "event of a provider": [
        *[partial(wire.read_event, array(part, EVENT).encode()) for part in JSON_PARTS],
        *around(lambda text: wire.read_event(text.encode()), EVENT, *UNCLOSED),
        *[
            partial(wire.read_event, f'"{filled(part, EVENT // 2 - 2)}"'.encode())
            for part in ("a", "\\n", "\u00e9", "[{")
        ],
    ],
    "document of a provider": [
        *[partial(wire.read_event, array(part, DOCUMENT).encode()) for part in JSON_PARTS],
        *[
            partial(wire.read_event, f'"{filled(part, DOCUMENT // 2 - 2)}"'.encode())
            for part in ("a", "\\n", "\u00e9", "[{")
        ],
    ],
    "error of a provider": [
        *[
            partial(refusals.stopped, {"error": {"message": filled(part, DOCUMENT), "code": code}}, ("secret",))
            for part in ("//", "/", "//a", "a*** ", "a", "\u00e9")
            for code in (429, "invalid")
        ],
        partial(refusals.stopped, {"error": {"message": "a", "code": [[0]] * EVENT, "type": {"a": [0] * EVENT}}}, ()),
        partial(refusals.stopped, {"detail": [{"loc": [0] * EVENT, "msg": "a"}]}, ()),
    ],
    # JSON joins pairs, so that only the halves at the ends of two events make one here.
    "text of a provider": [
        *around(wire.join_surrogates, EVENT // 6, "a", "\u00e9", "\ud800"),
        *around(wire.join_surrogates, CHUNK // 30, "\ud83d\ude00"),
    ],
    "arguments in a transcript": [
        *[partial(wire.arguments_object, array(part, ARGUMENTS)) for part in JSON_PARTS],
        *around(wire.arguments_object, OUTPUT, "[", "[],"),
    ],
    "URL": [
        *around(url_of, HEADER, "/", "a.", "\u00e4.", "\u00e4", "@", ":", "%41", "a:", "[", before="http://"),
        *around(url_of, HEADER, "%", "\u00e4", "/..", "?", "#", before="http://a/"),
    ],
}
