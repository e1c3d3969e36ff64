"""Tests of streams of real runs with real clients: run streams, and then those of chat front ends."""

import contextlib
import json
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from datetime import datetime
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from httpx_sse import EventSource

from tests.driver import Driver
from tests.fronts.conftest import parse as frames_of
from tests.fronts.conftest import said
from tests.stack.plugin import given_services
from tests.stack.redis import RedisServer
from tests.stack.stack import Stack, is_ready
from tests.streams.conftest import NOT_NEEDED, SHORT, STREAM_CONNECTIONS, Listener, StreamStack, parse, text_of

pytestmark = pytest.mark.stack

SCRIPT = "\n".join(
    ["/say First,", '/call calculate {"expression": "1+1"}', "/stream 30 30", "/ask Which?", "/say {result} it is"]
)


@pytest.fixture
def server() -> str:
    return "web"


@pytest.fixture
def driver(streams: StreamStack) -> Driver:
    return Driver(streams.session())


@pytest.mark.parametrize(("server", "surface"), [("web", "session"), ("stream", "public")])
def test_stream_has_all_events_of_a_live_run(streams, driver, server, surface):
    run = driver.start(SCRIPT)
    received = []
    for event in streams.listener(server, surface=surface).listen(run["id"]):
        received.append((int(event.id), event.event, event.json()))
        if event.event == "waitpoint.opened":
            # The stream stays open while the run waits. The answer is sent in another request.
            driver.respond(driver.wait(run["id"], "waiting"), kind="CLARIFICATION", answer="blue")
    assert [index for index, *_ in received] == list(range(1, len(received) + 1))
    assert received[-1][1:] == ("run.status", received[-1][2] | {"status": "completed"})
    ended = driver.get(run["id"])
    assert ended["lastStreamIndex"] == len(received)
    assert text_of(received) == driver.content(ended)
    assert text_of(received).endswith("blue it is")
    assert {"tool.started", "tool.completed", "waitpoint.opened", "waitpoint.resolved", "message.completed"} < {
        kind for _, kind, _ in received
    }
    # The other process gives the same events after the end of the run.
    assert streams.listener("stream" if server == "web" else "web").all(run["id"]) == received


def test_text_has_at_most_twenty_deltas_per_second(streams, driver, server):
    """The limit applies to fast models too, because each delta is a write to the database."""
    run = driver.finish("/stream 400 4")
    received = streams.listener(server).all(run["id"])
    deltas = [data["text"] for _, kind, data in received if kind == "message.delta"]
    begun, ended = (datetime.fromisoformat(run[name]) for name in ("startedAt", "finishedAt"))
    assert 2 <= len(deltas) <= (ended - begun).total_seconds() * 20 + 2
    assert len("".join(deltas).split()) == 400


def test_curl(streams, driver, server):
    run = driver.start("/stream 20 20")
    listener = streams.listener(server)
    url = f"{listener.base}/runs/{run['id']}/stream"
    command = ["curl", "-sSN", "--fail", "-m", "30", "-H", f"Authorization: {listener.headers['Authorization']}", url]
    done = subprocess.run(command, capture_output=True, check=True)
    assert text_of(parse(done.stdout)) == driver.content(driver.wait(run["id"]))


def test_reconnecting_client_gets_every_event_once(streams, driver, server):
    run = driver.start("/stream 40 20")
    listener = streams.listener(server)
    received: list[tuple[int, str, dict]] = []
    while not received or received[-1][2].get("status") != "completed":
        events = listener.listen(run["id"], received[-1][0] if received else None)
        for event, _ in zip(events, range(3), strict=False):
            received.append((int(event.id), event.event, event.json()))
        events.close()
    assert [index for index, *_ in received] == list(range(1, len(received) + 1))
    assert text_of(received) == driver.content(driver.get(run["id"]))


def test_an_index_past_the_end_waits_for_the_run_to_end(streams, driver, server):
    run = driver.start("/stream 50 30")
    assert streams.listener(server).all(run["id"], after=10_000) == []
    assert driver.get(run["id"])["status"] == "completed"


def test_a_stream_ends_when_its_run_is_cancelled(streams, driver, server):
    run = driver.ask("/ask Which?")
    events = streams.listener(server).listen(run["id"])
    assert next(events).id == "1"
    driver.cancel(run["id"])
    *_, last = events
    assert last.json()["status"] == "cancelled"


def test_disconnect_does_not_cancel_the_run_and_closes_the_socket(streams, driver, server):
    process = psutil.Process(streams.processes[server].pid)
    processes = [process, *process.children()]
    run = driver.ask("/ask Which?")
    before = sum(process.num_fds() for process in processes)
    listeners = [streams.listener(server).listen(run["id"]) for _ in range(20)]
    for events in listeners:
        next(events)
    assert sum(process.num_fds() for process in processes) >= before + 20
    for events in listeners:
        events.close()
    streams.wait_for(lambda: sum(process.num_fds() for process in processes) < before + 10)
    assert driver.get(run["id"])["status"] == "waiting"
    driver.cancel(run["id"])


def test_comments_keep_a_quiet_stream_open(streams, driver, server):
    run = driver.ask("/ask Which?")
    listener = streams.listener(server)
    url = f"{listener.base}/runs/{run['id']}/stream"
    with httpx.stream("GET", url, headers=listener.headers, trust_env=False, timeout=10) as answer:
        lines = answer.iter_lines()
        while '"status":"waiting"' not in next(lines):
            pass
        assert next(lines) == ""
        assert next(lines).startswith(":")
        assert next(lines).startswith(":")
    driver.cancel(run["id"])


def test_revoked_key_ends_only_its_own_streams(streams, driver, server):
    run = driver.ask("/ask Which?")
    made = streams.session().post("/api-keys", {"name": "short"}).json()
    base = streams.listener(server, surface="public").base
    revoked = Listener(base, made["secret"]).listen(run["id"])
    other = streams.listener(server, surface="public").listen(run["id"])
    next(revoked)
    next(other)
    assert streams.session().delete(f"/api-keys/{made['id']}").status_code == 204
    assert [event.event for event in revoked][-1] == "run.status"  # the stream gives the existing events before it ends
    driver.cancel(run["id"])
    *_, last = other
    assert last.json()["status"] == "cancelled"


def test_an_expired_token_ends_its_stream(streams, driver, server):
    run = driver.ask("/ask Which?")
    token = streams.manage("shell", "-c", MINT).strip().splitlines()[-1]
    received = Listener(streams.listener(server).base, token).all(run["id"])
    assert received[-1][2]["status"] == "waiting"
    driver.cancel(run["id"])


# A token stays valid for a leeway of 30 s after its expiry. This one has some seconds left.
MINT = "from config.api.session_tokens import mint; print(mint('ada', hours=-22 / 3600))"


def test_clients_that_do_not_read_lose_their_places(streams, driver, server):
    """The server does not keep unread events without limit. The client can connect again."""
    run = driver.start("/stream 3000 0\n" + "/say " + "x" * 90_000)
    driver.wait(run["id"])
    listener = streams.listener(server)
    host, port = listener.base.split("/")[2].split(":")
    request = f"GET /api/v1/runs/{run['id']}/stream HTTP/1.1\r\nHost: {host}\r\n"
    with contextlib.ExitStack() as slow:
        for _ in range(int(SHORT["STREAMS_PER_USER"])):
            connection = slow.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            connection.connect((host, int(port)))
            connection.sendall((request + f"Authorization: {listener.headers['Authorization']}\r\n\r\n").encode())
            assert connection.recv(12) == b"HTTP/1.1 200"

        def status() -> int:
            url = f"{listener.base}/runs/{run['id']}/stream"
            with httpx.stream("GET", url, headers=listener.headers, trust_env=False) as answer:
                return answer.status_code

        streams.wait_for(lambda: status() == 200, what="a place")
        assert text_of(listener.all(run["id"])) == driver.content(driver.get(run["id"]))


def test_restart_of_the_server_loses_no_events(streams, driver, server):
    run = driver.start("/stream 60 50")
    listener = streams.listener(server)
    received: list[tuple[int, str, dict]] = []

    def listen() -> None:
        while not received or received[-1][2].get("status") != "completed":
            try:
                for event in listener.listen(run["id"], received[-1][0] if received else None):
                    received.append((int(event.id), event.event, event.json()))
            except httpx.TransportError:
                pass

    client = threading.Thread(target=listen)
    client.start()
    streams.wait_for(lambda: len(received) > 4)
    streams.processes[server].stop(signal.SIGTERM)
    assert "Traceback" not in streams.logs(server, 1000)
    streams.processes[server].start()
    client.join(40)
    assert [index for index, *_ in received] == list(range(1, len(received) + 1))
    assert text_of(received) == driver.content(driver.get(run["id"]))


@pytest.mark.parametrize("server", ["stream"])
def test_a_server_that_stops_ends_its_streams_in_order(streams, driver, server):
    """The client sees the end of a whole answer, and connects again; it need not guess from a lost connection."""
    run = driver.ask("/ask Which?")
    listener = streams.listener(server)
    received: list[bytes] = []
    with (
        httpx.Client(timeout=30, trust_env=False) as http,
        http.stream("GET", f"{listener.base}/runs/{run['id']}/stream", headers=listener.headers) as answer,
    ):
        parts = answer.iter_bytes()
        received.append(next(parts))
        stopping = threading.Thread(target=streams.processes[server].stop, args=(signal.SIGTERM,))
        stopping.start()
        received += parts  # a connection that breaks raises an error
    stopping.join(40)
    streams.processes[server].start()
    streams.wait_for(lambda: is_ready(listener.base.partition("/api/")[0]))
    assert b"waitpoint.opened" in b"".join(received)


def test_silent_connections_do_not_block_streams(streams, driver, server):
    host, port = streams.listener(server).base.split("/")[2].split(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(1000)]
    try:
        run = driver.start("/stream 5 10")
        assert text_of(streams.listener(server).all(run["id"])) == driver.content(driver.wait(run["id"]))
    finally:
        for connection in silent:
            connection.close()


def test_kill_of_a_worker_resets_the_text_that_is_not_in_the_journal(streams, driver, server):
    run = driver.start('/say First.\n/call calculate {"expression": "1"}\n/stream 40 50')
    received: list[tuple[int, str, dict]] = []
    killed = False
    for event in streams.listener(server).listen(run["id"]):
        received.append((int(event.id), event.event, event.json()))
        if not killed and text_of(received).count("fox") == 2:
            streams.kill("runs-1")
            streams.restart("runs-1")
            killed = True
    assert "message.reset" in {kind for _, kind, _ in received}
    assert [index for index, *_ in received] == list(range(1, len(received) + 1))
    assert text_of(received) == driver.content(driver.get(run["id"]))


def test_streams_continue_without_redis(make_redis_stack):
    stack, redis = make_redis_stack
    driver, listener = Driver(stack.session()), Listener(f"{stack.url}/api/v1", stack.token("ada"))
    run = driver.ask("/ask Which?\n/say {result}")
    events = listener.listen(run["id"])
    next(events)
    redis.stop()
    driver.respond(driver.get(run["id"]), kind="CLARIFICATION", answer="blue")
    assert [event.json() for event in events][-1]["status"] == "completed"
    redis.start()
    run = driver.start("/stream 5 10")
    assert text_of(listener.all(run["id"])) == driver.content(driver.wait(run["id"]))


@pytest.fixture
def make_redis_stack(redis_server) -> Iterator[tuple[Stack, RedisServer]]:
    with Stack(**{**given_services(), "redis_url": redis_server.url()}, without=NOT_NEEDED) as stack:
        yield stack, redis_server


def test_an_event_is_one_block_of_lines(streams, driver, server):
    run = driver.finish("/say Hello")
    listener = streams.listener(server)
    with httpx.Client(trust_env=False) as http:
        answer = http.get(f"{listener.base}/runs/{run['id']}/stream", headers=listener.headers)
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-accel-buffering"] == "no"
    assert EventSource(answer)
    first = answer.text.split("\n\n")[0].splitlines()
    assert first[0].startswith(":")
    assert first[1:3] == ["id: 1", "event: run.status"]
    assert json.loads(first[3].removeprefix("data: "))["status"] == "queued"


def test_invalid_requests_get_the_error_envelope(streams, driver, server):
    run = driver.finish("/say Hello")
    listener = streams.listener(server)
    with httpx.Client(trust_env=False, headers={"Accept": "text/event-stream"}) as http:
        url = f"{listener.base}/runs/{run['id']}/stream"
        refused = http.get(f"{url}?after=x", headers=listener.headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "VALIDATION_ERROR")
        assert http.get(url).json()["error"]["code"] == "UNAUTHORIZED"
        assert http.get(f"{listener.base}/runs/run_x/stream", headers=listener.headers).status_code == 404
        assert http.post(url, headers=listener.headers, json={}).status_code == 405
        assert http.get(url, headers=listener.headers | {"X-Request-Id": "mine"}).headers["x-request-id"] == "mine"


def test_stream_over_the_connection_limit_gets_503(streams, driver):
    run = driver.ask("/ask Which?")
    listener = streams.listener("stream")
    open_ones = [listener.listen(run["id"]) for _ in range(STREAM_CONNECTIONS)]
    for events in open_ones:
        next(events)
    with httpx.Client(trust_env=False) as http:
        refused = http.get(f"{listener.base}/runs/{run['id']}/stream", headers=listener.headers)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "UNAVAILABLE")
    open_ones[0].close()

    def admitted() -> bool:
        with httpx.stream("GET", f"{listener.base}/runs/{run['id']}/stream", headers=listener.headers) as answer:
            return answer.status_code == 200

    streams.wait_for(admitted, what="a place")
    driver.cancel(run["id"])


# --- chat front ends ------------------------------------------------------------------------------------------------

FRONT_END = "/api/v1/ai-sdk/chat"


def test_a_server_that_stops_breaks_the_stream_of_a_front_end(streams, driver):
    """To these clients the end of a whole answer means that the run has finished."""
    base, headers = streams.url, {"Authorization": f"Bearer {streams.token('ada')}"}
    body = {"id": "stopped", "messages": [said("/wait 8\n/say late")]}
    with (
        httpx.Client(timeout=30, trust_env=False) as http,
        http.stream("POST", base + FRONT_END, json=body, headers=headers) as answer,
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
        frames = frames_of(http.post(base + FRONT_END, json=body, headers=headers).content)
    assert frames[-1][1] == "[DONE]"
    (chat,) = driver.http.get(f"/chats?clientId={body['id']}").json()["items"]
    assert len(driver.http.get(f"/chats/{chat['id']}/runs").json()["items"]) == 1


def test_a_front_end_that_leaves_after_every_byte(streams, driver):
    """Each gives its place back, and none of them harms the run or starts another one."""
    body = json.dumps({"id": "bytes", "messages": [said("/stream 40 50\n/say over")]}).encode()
    head = f"POST {FRONT_END} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {streams.token('ada')}\r\nContent-Length: {len(body)}\r\n\r\n"
    port = int(urlsplit(streams.url).port or 0)
    for count in (*range(1, 24), *range(40, 600, 80)):
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


def test_comments_keep_the_quiet_stream_of_a_front_end_open(streams):
    headers = {"Authorization": f"Bearer {streams.token('ada')}"}
    body = {"id": "quiet", "messages": [said("/wait 2\n/say late")]}
    with httpx.Client(timeout=30, trust_env=False) as http:
        answer = http.post(streams.url + FRONT_END, json=body, headers=headers)
    assert answer.headers["x-vercel-ai-ui-message-stream"] == "v1"
    assert answer.text.count(": keep-alive") > 2
    assert frames_of(answer.content)[-1][1] == "[DONE]"
