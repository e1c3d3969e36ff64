"""Streams of chat front ends: how they end, and clients that leave at every byte."""

import json
import signal
import socket
import threading
from urllib.parse import urlsplit

import httpx
import pytest

from tests.driver import Driver
from tests.fronts.conftest import parse, said
from tests.stack.stack import is_ready
from tests.streams.conftest import StreamStack

pytestmark = pytest.mark.stack

API = "/api/v1/ai-sdk/chat"


@pytest.fixture
def driver(streams: StreamStack) -> Driver:
    return Driver(streams.session("ada"))


def test_a_server_that_stops_breaks_the_connection(streams: StreamStack, driver: Driver) -> None:
    """To these clients the end of a whole answer means that the run has finished."""
    base, headers = streams.url, {"Authorization": f"Bearer {streams.token('ada')}"}
    body = {"id": "stopped", "messages": [said("/wait 8\n/say late")]}
    with (
        httpx.Client(timeout=30, trust_env=False) as http,
        http.stream("POST", base + API, json=body, headers=headers) as answer,
    ):
        assert answer.status_code == 200
        parts = answer.iter_bytes()
        assert next(parts).startswith(b":")
        stopping = threading.Thread(target=streams.processes["web"].stop, args=(signal.SIGTERM,))
        stopping.start()
        with pytest.raises(httpx.RemoteProtocolError):
            list(parts)
    stopping.join(40)
    streams.processes["web"].start()
    streams.wait_for(lambda: is_ready(base))
    # The run goes on, and the same message shows all of it.
    with httpx.Client(timeout=30, trust_env=False) as http:
        frames = parse(http.post(base + API, json=body, headers=headers).content)
    assert frames[-1][1] == "[DONE]"
    (chat,) = driver.http.get(f"/chats?clientId={body['id']}").json()["items"]
    assert len(driver.http.get(f"/chats/{chat['id']}/runs").json()["items"]) == 1


def test_a_client_that_leaves_after_every_byte(streams: StreamStack, driver: Driver) -> None:
    """Each gives its place back, and none of them harms the run or starts another one."""
    body = json.dumps({"id": "bytes", "messages": [said("/stream 40 50\n/say over")]}).encode()
    head = f"POST {API} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {streams.token('ada')}\r\nContent-Length: {len(body)}\r\n\r\n"
    port = int(urlsplit(streams.url).port or 0)
    for count in (*range(1, 40), *range(40, 600, 40)):
        with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
            client.sendall(head.encode() + body)
            left = count
            while left:
                received = len(client.recv(left))
                assert received
                left -= received
    (chat,) = driver.http.get("/chats?clientId=bytes").json()["items"]
    (run,) = driver.http.get(f"/chats/{chat['id']}/runs").json()["items"]
    ended = driver.wait(run["id"])
    assert ended["status"] == "completed"
    assert driver.content(ended).endswith("over")


def test_comments_keep_a_quiet_stream_open(streams: StreamStack) -> None:
    headers = {"Authorization": f"Bearer {streams.token('ada')}"}
    body = {"id": "quiet", "messages": [said("/wait 2\n/say late")]}
    with httpx.Client(timeout=30, trust_env=False) as http:
        answer = http.post(streams.url + API, json=body, headers=headers)
    assert answer.headers["x-vercel-ai-ui-message-stream"] == "v1"
    assert answer.text.count(": keep-alive") > 2
    assert parse(answer.content)[-1][1] == "[DONE]"
