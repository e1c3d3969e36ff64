"""The outbound client: the request that is sent, the limits of the answer, and kept connections."""

import contextlib
import gc
import gzip
import threading

import pytest

from config.outbound import client
from config.outbound.transport import Exchange
from tests.outbound.helpers import send
from tests.webhooks import receiver as behaviours
from tests.webhooks.receiver import answer, receiving


def test_path_and_query_are_sent_unchanged():
    with receiving() as receiver:
        path = "/a%2Fb/%C3%A9;p=1?x=%20+y&z=%E2%82%AC&&t=a/b?c"
        send(f"http://127.0.0.1:{receiver.port}{path}")
        assert receiver.requests[0].path == path


def test_sends_no_headers_except_the_necessary_and_the_given_ones():
    with receiving(answer(200, b"ok", "Set-Cookie: a=b\r\n")) as receiver:
        for _ in range(2):
            send(receiver.url, headers={"X-One": "1"}, reuse=True)
        for request in receiver.requests:
            assert {name.lower() for name, _ in request.headers} == {
                *("host", "accept-encoding", "content-length", "x-one")
            }


def test_credentials_of_the_environment_are_not_sent(monkeypatch, tmp_path):
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password hush\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with receiving() as receiver:
        send(receiver.url)
        assert receiver.requests[0].header("Authorization") is None


def test_proxies_of_the_environment_are_ignored(monkeypatch):
    with receiving(answer(200, b"direct")) as receiver, receiving(answer(200, b"proxy")) as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        assert send(receiver.url).body == b"direct"
        assert proxy.connections == 0


def test_redirects_are_returned_and_not_followed():
    with receiving(answer()) as target, receiving(behaviours.redirect(target.url)) as receiver:
        reply = send(receiver.url)
        assert (reply.status, reply.headers["location"]) == (302, target.url)
        assert target.connections == 0


def test_endless_body_is_truncated():
    with receiving(behaviours.endless_body) as receiver:
        reply = send(receiver.url, max_bytes=70_000)
        assert (len(reply.body), reply.truncated) == (70_000, True)


@pytest.mark.parametrize(("size", "truncated"), [(999, False), (1000, False), (1001, True)])
def test_size_limit_of_the_body(size, truncated):
    with receiving(answer(200, b"a" * size)) as receiver:
        reply = send(receiver.url)
        assert (len(reply.body), reply.truncated) == (min(size, 1000), truncated)


def test_incomplete_body_is_marked():
    with receiving(behaviours.break_off) as receiver:
        reply = send(receiver.url)
        assert (reply.status, reply.body, reply.truncated) == (200, b"partial", True)


def test_compressed_answer_is_not_decompressed():
    """The size limit counts transferred bytes: a megabyte of one letter takes a kilobyte."""
    packed = gzip.compress(b"a" * 1_000_000, mtime=0)
    with receiving(answer(200, packed, "Content-Encoding: gzip\r\n")) as receiver:
        reply = send(receiver.url, max_bytes=100_000)
        assert (reply.body, reply.truncated) == (packed, False)


def test_long_headers_are_read():
    with receiving(answer(200, b"ok", f"X-Long: {'a' * 30_000}\r\n")) as receiver:
        assert len(send(receiver.url).headers["X-Long"]) == 30_000


def test_endless_header_is_an_error():
    def endless(receiver, connection, request):
        with contextlib.suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\nX-Long: ")
            while not receiver.stopped.is_set():
                connection.sendall(b"a" * 65536)

    with receiving(endless) as receiver, pytest.raises(client.RequestFailed, match="not HTTP"):
        send(receiver.url, total_timeout=20)


def test_interim_answer_is_skipped():
    def early_hints(receiver, connection, request):
        connection.sendall(b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n")
        answer(201)(receiver, connection, request)

    with receiving(early_hints) as receiver:
        assert send(receiver.url).status == 201


def test_connections_are_kept_for_the_next_request():
    with receiving(answer()) as receiver:
        for _ in range(5):
            send(receiver.url, reuse=True)
        assert receiver.connections == 1
        for _ in range(2):
            send(receiver.url)
        assert receiver.connections == 3


def test_each_answer_on_a_kept_connection_may_have_long_headers():
    with receiving(answer(200, b"ok", f"X-Long: {'a' * 60_000}\r\n")) as receiver:
        for _ in range(6):  # together, they are longer than one answer may have
            assert send(receiver.url, reuse=True).body == b"ok"
        assert receiver.connections == 1


@pytest.mark.parametrize("reuse", [True, False])
def test_requests_that_have_ended_occupy_no_memory(reuse):
    with receiving() as receiver:
        for _ in range(400):
            send(receiver.url, reuse=reuse)
    gc.collect()
    # asyncio keeps what belongs to timers that were cancelled, but not many.
    assert sum(type(found) is Exchange for found in gc.get_objects()) < 200


def test_connection_with_unread_data_is_not_kept():
    with receiving(answer(200, b"a" * 5000)) as receiver:
        for _ in range(3):
            send(receiver.url, reuse=True)
        assert receiver.connections == 3


def test_kept_connection_that_the_receiver_closed_is_not_used():
    closed = threading.Event()

    def answer_then_close(receiver, connection, request):
        answer()(receiver, connection, request)
        behaviours.close(receiver, connection, request)
        closed.set()

    with receiving(answer_then_close, answer()) as receiver:
        assert send(receiver.url, reuse=True).status == 200
        assert closed.wait(30)
        assert send(receiver.url, reuse=True).status == 200


def test_request_lost_on_a_kept_connection_is_not_retried():
    with receiving(answer(), behaviours.close) as receiver:
        send(receiver.url, reuse=True)
        with pytest.raises(client.RequestFailed, match="closed without an answer"):
            send(receiver.url, reuse=True)
        assert len(receiver.requests) == 2


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "POST"])
@pytest.mark.parametrize("reuse", [False, True])
def test_no_request_is_sent_twice(method, reuse):
    """HTTP allows it for idempotent methods, but receivers may count requests."""
    with receiving(answer(), behaviours.close) as receiver:
        send(receiver.url, reuse=reuse, method=method)
        with pytest.raises(client.RequestFailed, match="closed without an answer"):
            send(receiver.url, reuse=reuse, method=method)
        assert len(receiver.requests) == 2
        assert receiver.connections == (1 if reuse else 2)
