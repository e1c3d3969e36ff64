"""Tests of invalid HTTP requests: the answer is an error, and nothing is created."""

import contextlib
import http.client
import json
import re
import socket
from collections.abc import Iterator

import pytest

from tests.stack.plugin import given_services
from tests.stack.stack import Stack
from tests.streams.conftest import NOT_NEEDED, SHORT

pytestmark = pytest.mark.stack

TITLE = b'{"title": "hostile"}'
DEEP = b'{"title": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"
LONG = b"x" * 100_000


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """A web process alone, with as few threads as a stream process, which runs the same program."""
    environment = SHORT | {"WEB_THREADS": "4"}
    with Stack(**given_services(), environment=environment, without=("runs-1", *NOT_NEEDED)) as running:
        yield running


@pytest.fixture
def server(stack: Stack) -> tuple[str, int]:
    return "127.0.0.1", stack.port


def send(server: tuple[str, int], request: bytes, *, finish: bool = False) -> tuple[int, bytes]:
    """Return the status and body of the answer. With ``finish`` the client closes its side after the request."""
    with socket.create_connection(server, timeout=20) as connection:
        connection.sendall(request)
        if finish:
            connection.shutdown(socket.SHUT_WR)
        try:
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            return answer.status, answer.read()
        except (ConnectionError, http.client.HTTPException):
            return 0, b""  # a closed connection is also a refusal


def head(stack: Stack, *lines: bytes, path: bytes = b"/api/v1/chats", method: bytes = b"POST") -> bytes:
    """Return the head of an authorized request. ``lines`` replace or extend the default headers."""
    given = {line.split(b":")[0].lower() for line in lines}
    usual = [
        b"Host: 127.0.0.1",
        b"Connection: close",
        b"Content-Type: application/json",
        b"Authorization: Bearer " + stack.token("ada").encode(),
    ]
    kept = [line for line in usual if line.split(b":")[0].lower() not in given]
    return b"\r\n".join([method + b" " + path + b" HTTP/1.1", *kept, *lines, b"", b""])


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)


def length(number: int) -> bytes:
    return b"Content-Length: %d" % number


CHUNKED = b"Transfer-Encoding: chunked"
# Name → header lines, body, allowed statuses. 0 stands for a closed connection.
BODIES: dict[str, tuple[list[bytes], bytes, set[int]]] = {
    "longer than it says": ([length(5)], TITLE, {400}),
    "without a length": ([], TITLE, {201, 400}),
    "two lengths": ([length(20), length(5)], TITLE, {400}),
    "negative length": ([b"Content-Length: -1"], TITLE, {400}),
    "length that is no number": ([b"Content-Length: 1e3"], TITLE, {400}),
    "length beside chunks": ([length(3), CHUNKED], chunked(TITLE) + b"0\r\n\r\n", {201}),
    "chunks beside length": ([CHUNKED, length(3)], chunked(TITLE) + b"0\r\n\r\n", {201}),
    "chunks of no size": ([CHUNKED], b"zz\r\n" + TITLE + b"\r\n0\r\n\r\n", {400}),
    "chunks over the limit": ([CHUNKED], chunked(*[b" " * 65536] * 40) + b"0\r\n\r\n", {413, 0}),
    "length over the limit": ([length(50_000_000)], b"{", {413, 0}),
    "deep": ([length(len(DEEP))], DEEP, {400}),
    "duplicate key": ([length(28)], b'{"title": "a", "title": "b"} '[:28], {400}),
    "huge number": ([length(22)], b'{"title": 1' + b"0" * 10 + b"}", {400}),
    "NUL": ([length(19)], b'{"title": "\\u0000"} ', {400}),
    "half a character": ([length(19)], b'{"title": "\\ud800"} ', {400}),
    "no UTF-8": ([length(15)], b'{"title": "\xff"} ', {400}),
    "form": ([b"Content-Type: application/x-www-form-urlencoded", length(9)], b"title=abc", {415}),
    "compressed": ([b"Content-Encoding: gzip", length(20)], TITLE, {201, 400, 415}),
}


@pytest.mark.parametrize("name", BODIES)
def test_bodies(stack: Stack, server: tuple[str, int], name: str) -> None:
    lines, body, statuses = BODIES[name]
    before = titles(stack)
    status, answer = send(server, head(stack, *lines) + body)
    assert status in statuses, answer
    after = titles(stack)
    made = after[: len(after) - len(before)]
    if status == 201:
        # The server must have read an accepted body. Without a length it reads no body.
        assert made == [None if name == "without a length" else "hostile"]
    else:
        assert made == []
        assert not answer or set(json.loads(answer)) == {"error"}


def titles(stack: Stack) -> list[str | None]:
    return [chat["title"] for chat in stack.session().get("/chats?limit=100").json()["items"]]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        (b"/api/v1/me", 200),
        (b"/api/v1/nothing", 404),
        (b"/api/public/v1/runs", 401),
        (b"/api/mcp", 401),
        (b"/api/schema", 200),
        (b"/nothing", 404),
        (b"/files/a/b/c", 404),
        (b"/uploads/x", 405),
        (b"/admin/login/", 200),
        (b"/static/staff/staff.css", 200),
        (b"/metrics", 401),
        (b"/livez", 200),
    ],
)
def test_an_answer_to_head_has_the_headers_only(
    stack: Stack, server: tuple[str, int], path: bytes, status: int
) -> None:
    lengths = []
    for method in (b"HEAD", b"GET"):
        with socket.create_connection(server, timeout=20) as connection:
            connection.sendall(head(stack, path=path, method=method))
            first, _, body = b"".join(iter(lambda: connection.recv(65536), b"")).partition(b"\r\n\r\n")
        assert first.startswith(b"HTTP/1.1 %d " % status)
        assert bool(body) == (method == b"GET")
        lengths.append(re.findall(rb"(?i)content-length: (\d+)", first))
    assert lengths[0] == lengths[1] == [b"%d" % len(body)]


def test_a_chunked_body_is_read(stack: Stack, server: tuple[str, int]) -> None:
    parts = chunked(TITLE[:7], TITLE[7:]) + b"0\r\n\r\n"
    status, answer = send(server, head(stack, CHUNKED) + parts)
    assert (status, json.loads(answer)["title"]) == (201, "hostile")


@pytest.mark.parametrize("body", [[length(100)], [CHUNKED]], ids=["length", "chunked"])
def test_incomplete_body_creates_nothing(stack: Stack, server: tuple[str, int], body: list[bytes]) -> None:
    before = titles(stack)
    sent = TITLE if body == [length(100)] else chunked(TITLE)
    status, _ = send(server, head(stack, *body) + sent, finish=True)
    assert status in (0, 400)
    assert titles(stack) == before


@pytest.mark.parametrize(
    ("lines", "statuses"),
    [
        ([b"Authorization: Bearer x", b"Authorization: Bearer y"], {400, 401}),
        ([b"Authorization: Bearer " + LONG], {431}),
        ([b"X-%d: 1" % number for number in range(101)], {431}),
        ([b"X-Long: " + LONG], {431}),
        ([b"Host: evil.example"], {400}),
        ([b"Host: a b"], {400}),
        ([b"Host: 127.0.0.1", b"Host: evil.example"], {400}),
        ([b"X-Nul: a\0b"], {400}),
        ([b"Idempotency-Key: \xff\xfe"], {400}),
        ([b"Accept: \xed\xa0\x80"], {200, 400, 406}),
    ],
    ids=lambda value: value[0][:24].decode("latin1") if isinstance(value, list) else "",
)
def test_headers(stack: Stack, server: tuple[str, int], lines: list[bytes], statuses: set[int]) -> None:
    method = b"POST" if b"Idempotency" in lines[0] else b"GET"
    extra = [length(2)] if method == b"POST" else []
    status, answer = send(server, head(stack, *lines, *extra, method=method) + b"{}" * len(extra))
    assert status in statuses, (status, answer[:300])
    if status >= 400 and answer:  # the server itself answers what is not HTTP, without a body
        assert set(json.loads(answer)) == {"error"}, answer[:300]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        (b"/api/v1/chats/%00", 404),
        (b"/api/v1/chats/%ED%A0%80", 404),
        (b"/api/v1/chats/%2e%2e%2f%2e%2e%2fetc%2fpasswd", 404),
        (b"/api/v1/runs/%00/stream", 404),
        (b"/api/v1/chats?cursor=%00", 400),
        (b"/api/v1/chats?limit=%ED%A0%80", 400),
        (b"/api/v1/runs?status=%00", 400),
        (b"/api/v1/nothing?" + b"&".join(b"a%d=1" % number for number in range(2000)), 404),
    ],
)
def test_paths(stack: Stack, server: tuple[str, int], path: bytes, status: int) -> None:
    found, answer = send(server, head(stack, path=path, method=b"GET"))
    assert found == status, answer
    assert set(json.loads(answer)) == {"error"}


# What arrives on a connection → the statuses of the answers. The connection ends after a refusal, and after the last
# request. The server itself answers what is not HTTP, without a body.
GET = b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n"
LAST = GET + b"Connection: close\r\n\r\n"
POST = b"POST /api/v1/chats HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
WIRE: dict[str, tuple[bytes, list[int]]] = {
    "three in one packet": ((GET + b"\r\n") * 2 + LAST, [200, 200, 200]),
    "one, then garbage": (GET + b"\r\n\0garbage\r\n\r\n", [200, 400]),
    "empty lines first": (b"\r\n\r\n" + LAST, [200]),
    "folded header": (GET + b"A: b\r\n c\r\n\r\n", [400]),
    "space before the colon": (GET + b"Transfer-Encoding : chunked\r\n\r\n", [400]),
    "other codings": (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", [501]),
    "chunked twice": (POST + CHUNKED + b"\r\n" + CHUNKED + b"\r\n\r\n0\r\n\r\n", [501]),
    "a hidden chunked": (POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", [400]),
    "chunks in HTTP/1.0": (POST.replace(b"1.1", b"1.0") + CHUNKED + b"\r\n\r\n0\r\n\r\n", [400]),
    "chunks, then a request": (POST + CHUNKED + b"\r\nContent-Length: 5\r\n\r\n0\r\n\r\n" + LAST, [401]),
    "a length of 23 digits": (POST + b"Content-Length: " + b"9" * 23 + b"\r\n\r\n{}", [400]),
    "padded chunks": (POST + CHUNKED + b"\r\n\r\n1;" + b"e" * 40_000 + b"\r\n \r\n", [400]),
    "expects 100": (POST + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n{}" + LAST, [100, 401, 200]),
    "expects 100 for too much": (POST + b"Expect: 100-continue\r\nContent-Length: 5000000\r\n\r\n", [401]),
    "upgrade": (GET + b"Upgrade: h2c\r\nHTTP2-Settings: AAA\r\nConnection: Upgrade, close\r\n\r\n", [200]),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", []),
    "HTTP/2.0 in a request line": (b"GET /livez HTTP/2.0\r\nHost: 127.0.0.1\r\n\r\n", [400]),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100), [400]),
    "an absolute address": (LAST.replace(b"/livez", b"http://127.0.0.1/livez"), [200]),
    "an unknown method": (LAST.replace(b"GET", b"FETCH"), [405]),
    "a path of 60,000 characters": (LAST.replace(b"/livez", b"/nowhere/" + b"a" * 60_000), [404]),
    "a path of 70,000 characters": (LAST.replace(b"/livez", b"/" + b"a" * 70_000), [414]),
    "a header of 20,000 characters": (GET + b"X: " + b"a" * 20_000 + b"\r\n\r\n", [431]),
    "a header without end": (GET + b"X: " + b"a" * 300_000, [431]),
    "HEAD": (b"HEAD" + GET[3:] + b"\r\n" + LAST, [200, 200]),
}


@pytest.mark.parametrize("name", WIRE)
def test_what_arrives_on_a_connection(server: tuple[str, int], name: str) -> None:
    sent, statuses = WIRE[name]
    with socket.create_connection(server, timeout=20) as connection:
        connection.sendall(sent)
        received = b""
        with contextlib.suppress(ConnectionResetError):  # the server has not read all
            while part := connection.recv(65536):
                received += part
    assert [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d{3}) ", received)] == statuses, received[:2000]
    body = received.rpartition(b"\r\n\r\n")[2]
    if statuses and statuses[-1] >= 400 and statuses[-1] not in (404, 405) and body:
        assert set(json.loads(body)) == {"error"}
        assert (b'"HEADERS_TOO_LARGE"' in received) == (statuses[-1] == 431)


def test_a_request_of_single_bytes_is_read(server: tuple[str, int]) -> None:
    with socket.create_connection(server, timeout=20) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in GET + b"Connection: close\r\n\r\n":
            connection.sendall(bytes([byte]))
        assert b"200 OK" in b"".join(iter(lambda: connection.recv(65536), b""))


def test_unfinished_requests_do_not_block_other_requests(stack: Stack, server: tuple[str, int]) -> None:
    beginnings = [head(stack)[:-30], head(stack, length(1000)) + b"{", head(stack, CHUNKED) + b"3e8\r\n{"]
    stalled = []
    for number in range(30):  # many more than the process has threads
        connection = socket.create_connection(server, timeout=20)
        connection.sendall(beginnings[number % 3])
        stalled.append(connection)
    assert send(server, head(stack, path=b"/livez", method=b"GET"))[0] == 200
    for connection in stalled:
        connection.close()


@pytest.mark.parametrize("header", [b"SCRIPT_NAME", b"Script-Name", b"PATH_INFO", b"X-Forwarded-Prefix"])
def test_a_header_does_not_change_the_path(stack: Stack, server: tuple[str, int], header: bytes) -> None:
    for prefix in (b"/api", b"/elsewhere"):
        request = head(stack, header + b": " + prefix, path=b"/api/v1/me", method=b"GET")
        status, body = send(server, request)
        # A server may also refuse a name with an underscore.
        assert status == 400 or (status == 200 and json.loads(body)["username"] == "ada")


def test_a_large_form_is_refused_before_it_is_read(stack: Stack, server: tuple[str, int]) -> None:
    for path in (b"/admin/login/", b"/playground", b"/files/x", b"/nowhere"):
        for kind in (b"application/x-www-form-urlencoded", b"multipart/form-data; boundary=b"):
            lines = [b"Content-Type: " + kind, length(500_000_000)]
            # Without a body: a server that wants to read it would not answer.
            assert send(server, head(stack, *lines, path=path))[0] == 413


def test_no_traceback_was_written(stack: Stack) -> None:
    assert "Traceback" not in stack.logs("web", 100_000)
