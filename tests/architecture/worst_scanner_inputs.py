"""Readers that are written by hand or left to a library, with their worst inputs (``worst_inputs``)."""

import base64
from functools import partial

from django.core.handlers.wsgi import get_path_info
from django.utils.http import parse_etags
from opentelemetry.propagate import extract
from rest_framework.negotiation import DefaultContentNegotiation

from config.api import authentication, ratelimit, session_tokens
from config.api.negotiation import ExactJSONRenderer
from config.kernel.jsontext import parse_object, parse_value
from config.outbound import addresses
from config.outbound.client import Answer
from credits.serializers import CsvRenderer
from runs.fronts.ag_ui import views as ag_ui
from runs.fronts.ai_sdk import views as ai_sdk
from runs.fronts.views import UI_VALUES_MAX
from runs.llm import demo, registry
from runs.mcp import views as mcp
from runs.tools import base, questions
from runs.tools import http as http_tool
from runs.tools.base import ToolDefinition, ToolResult
from runs.tools.builtin import calculate, web_fetch
from runs.tools.mcp import transport as mcp_transport
from tests.architecture.worst_inputs import (
    ANSWER,
    BODY,
    HEADER,
    JSON_PARTS,
    KIB,
    SCRIPT,
    UI_BODY,
    UNCLOSED,
    Work,
    a_request,
    around,
    array,
    each,
    filled,
    ui_file,
)

TOOL = ToolDefinition("tool", "Tool", "", "http", {}, 1)


def negotiated(accept: str) -> object:
    renderers = [ExactJSONRenderer(), CsvRenderer()]
    return DefaultContentNegotiation().select_renderer(a_request("Accept", accept), renderers)


def tool_result(value: str) -> ToolResult:
    body = f'{{"result": {value}}}'.encode()
    return base.clean_result(http_tool._result(TOOL, Answer(200, {}, body, False)))


def called_back(value: str) -> object:
    return http_tool.read_callback(value.encode(), "application/json", name="tool", price=1)


def ui_body(text: str) -> object:
    return parse_object(text.encode(), values=UI_VALUES_MAX)


def ai_sdk_message(part: dict[str, str]) -> None:
    parts = [part] * (UI_BODY // len(str(part)))
    sent = ai_sdk.Sent({"id": "a", "messages": [{"id": "a", "role": "user", "parts": parts}]})
    assert [sent.text, *sent.files()]


def ag_ui_request(**items: dict[str, str]) -> None:
    lists = {name: [item] * min(UI_VALUES_MAX, UI_BODY // len(str(item))) for name, item in items.items()}
    sent = ag_ui.Sent({"threadId": "a", "runId": "a", **lists})
    assert [sent.text, sent.results(), sent.said("agent")]


def form(name: str) -> dict[str, object]:
    properties = {f"{name}{number}": {"type": "string"} for number in range(300)}
    asked = {"message": filled("a", ANSWER // 16), "requestedSchema": {"type": "object", "properties": properties}}
    return {"method": "elicitation/create", "params": asked}


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
    "If-None-Match": around(parse_etags, HEADER, ",", "W/", '"a",'),
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
    "headers of MCP": around(mcp.decode_header, HEADER, "=", "a", before="=?base64?", after="?="),
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
        partial(web_fetch.decode, sign * (ANSWER // len(sign)), f"text/html; charset={charset}")
        for charset in ("utf-7", "utf-16", "utf-32", "gb18030", "shift_jis", "euc-kr", "big5", "latin-1", "punycode")
        for sign in (b"\xff", b"+", b"\xd8\x00", b"\x81\x30")
    ],
    "result of an HTTP tool": [
        *[partial(tool_result, array(part, ANSWER - 20)) for part in (*JSON_PARTS, "9" * 4300 + ",", "1e999999999,")],
        *[
            partial(tool_result, text)
            for text in (filled("[", ANSWER - 20), '"' + filled("\\u00e9", ANSWER - 40) + '"')
        ],
        partial(tool_result, '1, "creditUsed": 0.' + "0" * (ANSWER - 50) + "1"),
        partial(tool_result, '1, "creditUsed": 1e-999999999'),
    ],
    "body of a front end": [
        *around(ui_body, UI_BODY, *UNCLOSED),
        *[partial(ui_body, f'{{"a":{array(part, size)}}}') for part in JSON_PARTS for size in (UI_BODY - 10, 400_000)],
        *around(ui_body, UI_BODY, "a", "\\u00e9", before='{"a":"\\u00e9', after='"}'),
    ],
    "message of the AI SDK": [
        *around(ui_file, UI_BODY, "a", "%41", "=", "\u00e9", before="data:;base64,"),
        *[partial(ai_sdk_message, {"type": kind, "text": "a", "url": "data:,"}) for kind in ("text", "file", "a")],
    ],
    "request of AG-UI": [
        partial(ag_ui_request, messages={"role": "tool", "toolCallId": "a"}),
        partial(ag_ui_request, messages={"role": "user"}, tools={}, context={"description": "", "value": ""}),
    ],
    "callback of a tool": [
        *[partial(called_back, array(part, ANSWER)) for part in (*JSON_PARTS, "9" * 4300 + ",", "1e999999999,")],
        *around(called_back, ANSWER, *UNCLOSED, "[", " "),
        *around(called_back, ANSWER, "\\u00e9", "inv_", before='"', after='"'),
        *[
            partial(called_back, f'{{"progress":{{"fraction":{number}}}}}')
            for number in (filled("9", 4300), "1e-999999999", "1e999999999", "0." + filled("0", ANSWER - 50) + "1")
        ],
    ],
    "token of a callback": around(http_tool.call_of, HEADER, ".", "a", "inv_a."),
    "questions of a tool's server": [
        partial(questions.Dialogue().with_requests, {str(number): form(str(number)) for number in range(16)}),
        partial(questions.Dialogue().with_requests, {str(number): {} for number in range(20_000)}),
    ],
    "list of a provider's models": [
        *[
            partial(registry.names_in, f'{{"data":{array(part, registry.LIST_MAX_BYTES)}}}'.encode())
            for part in (*JSON_PARTS, '{"id":"a"},')
        ]
    ],
    "script of the demo model": [
        *around(demo.parse_script, SCRIPT, "1", "1.", before="/wait "),
        *around(demo.parse_script, SCRIPT, "1", "1 ", before="/stream "),
    ],
    "host name": around(lambda host: addresses._getaddrinfo(host, 80), HEADER, "\u00e4", "\u00e4.", "\u0645", "xn--"),
}
