"""Uploads and downloads through the real web server, as the test client reads bodies in another way."""

import hashlib
import os
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests

from tests.stack.stack import Client, Stack

pytestmark = [pytest.mark.stack, pytest.mark.slow]
CONTENT = os.urandom(3_000_000).hex().encode()


@pytest.fixture(scope="module")
def client(stack: Stack) -> Client:
    return stack.public("ada")


def announce(client: Client, size: int = len(CONTENT)) -> dict[str, Any]:
    answer = client.post("/attachments", json={"fileName": "a.txt", "contentType": "text/plain", "sizeBytes": size})
    assert answer.status_code == 201, answer.text
    return answer.json()


def address(stack: Stack, attachment: dict[str, Any]) -> str:
    return f"http://127.0.0.1:{stack.port}{urlsplit(attachment['upload']['url']).path}"


def pieces(content: bytes) -> Iterator[bytes]:
    """Yield the content in pieces, so that the client sends chunks without a Content-Length."""
    for start in range(0, len(content), 50_000):
        yield content[start : start + 50_000]


@pytest.mark.parametrize("body", [lambda: CONTENT, lambda: pieces(CONTENT)], ids=["whole", "chunked"])
def test_a_file_is_uploaded_and_downloaded(stack: Stack, client: Client, body: Any) -> None:
    attachment = announce(client)
    sent = requests.put(address(stack, attachment), data=body(), timeout=30)
    assert (sent.status_code, sent.content) == (204, b"")
    assert sent.headers["X-Request-Id"]
    done = client.post(f"/attachments/{attachment['id']}/complete")
    assert done.json()["sha256"] == hashlib.sha256(CONTENT).hexdigest(), done.text
    path = f"/attachments/{attachment['id']}/content"
    assert client.get(path).content == CONTENT
    part = client.get(path, headers={"Range": "bytes=100000-299999"})
    assert (part.status_code, part.content) == (206, CONTENT[100_000:300_000])


@pytest.mark.parametrize("size", [10, len(CONTENT) - 1, len(CONTENT) + 1])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_wrong_size_is_400(stack: Stack, client: Client, size: int, chunked: bool) -> None:
    attachment = announce(client, size)
    # The server may answer, and close, before it has read all of the body.
    body = pieces(CONTENT) if chunked else CONTENT
    try:
        sent = requests.put(address(stack, attachment), data=body, timeout=30)
        assert (sent.status_code, sent.json()["error"]["code"]) == (400, "VALIDATION_ERROR")
    except requests.ConnectionError:
        assert size < len(CONTENT) or not chunked
    assert client.post(f"/attachments/{attachment['id']}/complete").status_code == 409


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        (b"Content-Length: 5\r\n", b"123"),
        (b"Transfer-Encoding: chunked\r\n", b"3\r\n123\r\n"),
        (b"Transfer-Encoding: chunked\r\n", b"zz\r\n"),
        (b"Content-Length: -5\r\n", b"12345"),
    ],
)
def test_an_incomplete_body_or_a_wrong_length_stores_nothing(
    stack: Stack, client: Client, headers: bytes, body: bytes
) -> None:
    attachment = announce(client, 5)
    path = urlsplit(attachment["upload"]["url"]).path.encode()
    with socket.create_connection(("127.0.0.1", stack.port), timeout=30) as connection:
        connection.sendall(b"PUT " + path + b" HTTP/1.1\r\nHost: localhost\r\n" + headers + b"\r\n" + body)
        connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert not answer or answer.startswith(b"HTTP/1.1 400 "), answer
    assert client.post(f"/attachments/{attachment['id']}/complete").status_code == 409
    assert requests.put(address(stack, attachment), data=b"12345", timeout=30).status_code == 204
