"""The worst inputs of everything that reads text from outside, each at its size limit (test_worst_inputs.py).

``PATTERNS`` has an entry for each regular expression, ``SCANNERS`` (worst_scanner_inputs.py) for what is written by
hand or left to a library, and ``ON_EVENT_LOOPS`` (worst_loop_inputs.py) for what an event loop executes. An entry is a
name and calls without arguments.
"""

import base64
import re
from collections.abc import Callable
from functools import partial

from django.conf import settings
from django.test import RequestFactory
from rest_framework.request import Request

from apikeys import keys
from chats import files as chat_files
from chats import views
from chats.serializers import MEDIA_TYPE, AttachmentInput, ChatInput
from chats.services import CLIENT_ID
from config.api import authentication, idempotency, middleware, pagination
from config.api.negotiation import check_media_type
from runs import catalogue
from runs.calls import ClientToolInput
from runs.catalogue import definitions, entries, rules, yaml
from runs.fronts import views as front_views
from runs.fronts.ai_sdk import views as ai_sdk
from runs.llm import base as llm_base
from runs.llm import demo, measure, openai_responses, refusals, wire
from runs.mcp.tools import KeyInput
from runs.serializers import METADATA_KEY
from runs.tools import base, files, schema
from runs.tools import http as http_tool
from runs.tools.builtin import draw_chart, web_fetch

Work = Callable[[], object]

KIB = 1024
# No server in front of the application accepts a longer header or path.
HEADER = 64 * KIB
BODY = settings.API_MAX_BODY_BYTES
UI_BODY = settings.UI_MAX_BODY_BYTES
ANSWER = settings.TOOL_ANSWER_MAX_BYTES
EVENT = wire.MODEL_EVENT_MAX_BYTES
OUTPUT = llm_base.MODEL_OUTPUT_MAX_CHARS
PROVIDER_MODEL = 200
SCRIPT = settings.MESSAGE_MAX_CHARS
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
    return rules.VARIABLE.sub("", text)


def ui_file(url: str) -> None:
    message = {"id": "a", "role": "user", "parts": [{"type": "file", "url": url}]}
    ai_sdk.Sent({"id": "a", "messages": [message]}).files()


def position(text: str) -> None:
    front_views.position_of(Request(RequestFactory().get("/", headers={"Last-Event-ID": text})))


def signed(timestamp: str, signatures: str) -> bool:
    headers = {"webhook-id": "a", "webhook-timestamp": timestamp, "webhook-signature": signatures}
    return http_tool.is_signed(headers, bytes(ANSWER), base64.b64encode(bytes(32)).decode(), 0)


JSON_PARTS = ("[],", "{},", "[[[[[[]]]]]],", "1.5,", "1e308,", '"",', '{"a":1},', '"\\u00e9",', "-1e-308,", "12,")
UNCLOSED = ('"\\', '"', "\\", '"a', "[]", '"":')

# By file and by the name of the pattern, or of the function that uses it.
PATTERNS: dict[str, list[Work] | str] = {
    "apikeys/keys.py: _SHAPE": around(keys.find_key, HEADER, "a", before=keys.MARK),
    "runs/mcp/tools.py: idempotency_key": around(
        lambda text: KeyInput.validated({"idempotencyKey": text}), BODY, " ", after="\n\n"
    ),
    "chats/serializers.py: client_id": around(
        lambda text: ChatInput.validated({"clientId": text}), BODY, " ", "a", after=TAIL
    ),
    "chats/serializers.py: sha256": around(
        lambda text: AttachmentInput.validated({"fileName": "a", "contentType": "a/b", "sizeBytes": 1, "sha256": text}),
        BODY,
        "a",
    ),
    "chats/services.py: CLIENT_ID": around(CLIENT_ID.fullmatch, UI_BODY, " ", "a", after=TAIL),
    "chats/views.py: RANGE": [
        *around(lambda header: views.byte_range(header, 1), HEADER, " ", "1", before="bytes=", after=TAIL),
        *around(lambda header: views.byte_range(header, 1), HEADER, " ", before="bytes=1-2", after=TAIL),
    ],
    "chats/serializers.py: MEDIA_TYPE": [
        *around(MEDIA_TYPE.fullmatch, HEADER, "a", before="a/"),
        *(
            work
            for before in ("a/b", "a/b;", "a/b;charset", "a/b;charset=", "a/b;charset=utf8")
            for work in around(MEDIA_TYPE.fullmatch, HEADER, " ", before=before, after=TAIL)
        ),
    ],
    "chats/files.py: SIGNATURES": [lambda: chat_files.inspect([b"%PDF" * KIB], "application/pdf")],
    "config/database/queries.py: _with_fixed_types": OUR_TEXT,
    "config/database/writes.py: _cast": OUR_TEXT,
    "config/api/negotiation.py: _MEDIA_TYPE": [
        work
        for before in ("", ";", ";charset", ";charset=", ";charset=utf8", ";charset=utf8;")
        for work in around(check_media_type, HEADER, " ", "\t", before=f"application/json{before}", after=TAIL)
    ],
    "config/api/serializers.py: camel": OUR_TEXT,
    "config/api/middleware.py: REQUEST_ID": around(middleware.REQUEST_ID.fullmatch, HEADER, "a"),
    "config/api/pagination.py: CURSOR": around(pagination.decode_cursor, HEADER, "9", "a", before="1-"),
    "config/api/idempotency.py: KEY": around(idempotency.KEY.fullmatch, HEADER, " "),
    "config/api/authentication.py: _BEARER": [
        *around(bearer, HEADER, " ", before="bearer"),
        *around(bearer, HEADER, "a", "a=", "=", " ", before="bearer a", after=TAIL),
    ],
    "config/env.py: postgres": OUR_TEXT,
    "config/checks.py: ORIGIN": OUR_TEXT,
    "config/checks.py: is_redis_url": OUR_TEXT,
    "config/urls.py: urlpatterns": FIXED,
    "runs/catalogue/__init__.py: REFERENCE": around(catalogue.REFERENCE.fullmatch, BODY, "a", "a@1"),
    "runs/catalogue/rules.py: TOOL_NAME": around(rules.TOOL_NAME.fullmatch, BODY, "a"),
    "runs/catalogue/agents.py: name": around(rules.TOOL_NAME.fullmatch, BODY, "a"),
    "runs/catalogue/rules.py: VARIABLE": around(variables, BODY, "${", "$${", "$", "${}"),
    "runs/catalogue/entries.py: new_variable": OUR_TEXT,
    "runs/catalogue/rules.py: _variable": FIXED,
    "runs/catalogue/entries.py: secret": around(entries.ENDPOINT_SECRET.match, BODY, "a", "=", after=TAIL),
    "runs/catalogue/entries.py: ENDPOINT_SECRET": around(entries.ENDPOINT_SECRET.match, BODY, "a", "=", after=TAIL),
    "runs/catalogue/yaml.py: SCALARS": around(yaml.SCALARS["float"].match, BODY, "1", "1.", ".1", "1e", after=TAIL),
    "runs/catalogue/yaml.py: OTHER_BREAKS": around(yaml.OTHER_BREAKS.search, BODY, "a", after=TAIL),
    "runs/catalogue/definitions.py: CLAUDE": around(
        definitions.CLAUDE.search, PROVIDER_MODEL, "claude-", "claude-a-", "a-"
    ),
    "runs/catalogue/definitions.py: NO_REASONING_WITH_TOOLS": around(
        definitions.NO_REASONING_WITH_TOOLS.search, PROVIDER_MODEL, "/gpt-6", "gpt-5.", "5"
    ),
    "runs/catalogue/definitions.py: REASONING_MODEL": around(
        definitions.REASONING_MODEL.search, PROVIDER_MODEL, "/gpt-5", "/o", "5"
    ),
    "runs/fronts/ai_sdk/views.py: BROKEN_ESCAPE": around(ui_file, UI_BODY, "%41", "%4", "%", before="data:,"),
    "runs/fronts/ai_sdk/views.py: DATA_URL": [
        *around(ai_sdk.DATA_URL.match, UI_BODY, ";", "a", ";a", "a;", ";base64", "data:", before="data:"),
        *around(ai_sdk.DATA_URL.match, UI_BODY, ";", "a", before="data:", after=","),
    ],
    "runs/fronts/ai_sdk/views.py: OWN_URL": around(
        ai_sdk.OWN_URL.fullmatch, UI_BODY, "a", "/content", before="/api/v1/attachments/att_"
    ),
    "runs/fronts/views.py: position_of": around(position, HEADER, "1", "1.1", before="1."),
    "runs/calls.py: name": around(
        lambda name: ClientToolInput.validated({"name": name, "description": "", "inputSchema": {}}), BODY, "a", "\n"
    ),
    "runs/llm/openai_responses.py: PLAIN_MODEL": around(
        openai_responses.PLAIN_MODEL.search, PROVIDER_MODEL, "/gpt-5", "gpt-5.", "5"
    ),
    "runs/llm/openai_responses.py: REFUSES_ENCRYPTED": around(
        openai_responses.REFUSES_ENCRYPTED.search, EVENT, "encrypte", "inclu"
    ),
    "runs/llm/wire.py: ACCEPTED": around(wire.sent_name, OUTPUT, "a", "\u00e9"),
    "runs/llm/wire.py: ACCEPTED_ID": around(wire.sent_id, OUTPUT, "a", "\u00e9"),
    "runs/llm/wire.py: sent_name": around(wire.sent_name, OUTPUT, ".", "a."),
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
    "runs/llm/measure.py: EXPONENT": around(measure.EXPONENT.search, OUTPUT, "1", "e", "1 "),
    "runs/serializers.py: METADATA_KEY": around(METADATA_KEY.fullmatch, BODY, "a"),
    "runs/tools/schema.py: LOOK_AROUND_OR_BACK_REFERENCE": around(
        schema.LOOK_AROUND_OR_BACK_REFERENCE.search, ANSWER, "a", "(", "(?", "(?<", "\\"
    ),
    "runs/catalogue/imports.py: import_mcp": around(partial(re.sub, r"[^A-Za-z0-9_-]+", "_"), ANSWER, "a", " ", "a "),
    "runs/privacy.py: _hide_in_log": OUR_TEXT,
    "runs/tools/base.py: _SURROGATE": around(base.clean_text, ANSWER, "\ud800", "a"),
    "runs/tools/base.py: is_address": around(base.is_address, ANSWER, "a", before="http://"),
    "runs/tools/base.py: parse_headers": [
        *around(lambda name: base.parse_headers(f'{{"{name}": "a"}}'), BODY, "a"),
        *around(lambda value: base.parse_headers(f'{{"a": "{value}"}}'), BODY, "a", " ", before="a"),
    ],
    "runs/tools/http.py: is_signed": [
        *around(lambda timestamp: signed(timestamp, ""), HEADER, "1"),
        *around(lambda signatures: signed("1", signatures), HEADER, " ", "v1,a ", "a"),
    ],
    "runs/tools/http.py: CALLBACK_TOKEN": around(
        http_tool.without_tokens,
        ANSWER,
        *("inv_", "inv_a", "inv_a.", f"inv_{'a' * 60}", f"inv_a.{'a' * 42} ", f"inv_{'a' * 60}.{'a' * 43}"),
    ),
    "runs/tools/http.py: CHARSET": around(
        http_tool.CHARSET.search, HEADER, "charset=", "charset=utf", "charset='iso-8859-"
    ),
    "runs/tools/builtin/web_fetch.py: _MARKUP": around(
        web_fetch.page_text,
        ANSWER,
        *("<", "<a", "</", "<!", "<!--", "<!-- --", "<?", "<a>", "<p>", "<p", "</p>", "<a ", "<a/", "<A"),
        *("<script", "<script>", "<script/>", "<script ", "<script/", "<script></scripts>", "<svg></svg>", "</script"),
    ),
    "runs/tools/builtin/web_fetch.py: _EMPTY_LINES": around(
        web_fetch.page_text, ANSWER, " ", "\n", " \n", "a\n", "\u2028", "\t "
    ),
    "runs/tools/builtin/draw_chart.py: _NOT_XML": around(
        lambda title: draw_chart.draw(title, [1e15, -1e15, 5e-324] * 333), draw_chart.TITLE_MAX_CHARS, "\x00", "<"
    ),
    "runs/tools/files.py: TOKEN_PATTERN": around(files.TOKEN_PATTERN.fullmatch, HEADER, "a"),
    "runs/tools/files.py: FILE_NAME_PATTERN": around(files.is_file_name, HEADER, "a", " ", "a "),
}
