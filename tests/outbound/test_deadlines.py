"""The outbound client: time limits of requests and of look-ups of names."""

import contextlib
import socket
import threading
import time

import pytest

from config.outbound import addresses, client, transport
from config.outbound.loop import shared
from tests.outbound.helpers import send
from tests.tiers import slow
from tests.webhooks import receiver as behaviours
from tests.webhooks.receiver import receiving


@pytest.mark.parametrize("behaviour", [behaviours.hang, behaviours.drip_header, behaviours.drip_body])
@pytest.mark.parametrize("reuse", [False, *slow(True)])
def test_deadline_covers_header_and_body(behaviour, reuse):
    with receiving(behaviour) as receiver:
        start = time.monotonic()
        with pytest.raises(client.RequestTimedOut):
            send(receiver.url, total_timeout=0.3, reuse=reuse)
        assert time.monotonic() - start >= 0.29


def test_deadline_covers_sending():
    """The receiver accepts the connection and reads nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(client.RequestTimedOut):
        send(f"http://127.0.0.1:{listener.getsockname()[1]}/", body=b"a" * 20_000_000, total_timeout=0.5)


def test_unsent_data_is_dropped_after_the_deadline():
    """Unsent data is dropped with the connection, so it does not stay in memory."""
    body = b"a" * 20_000_000
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with pytest.raises(client.RequestTimedOut):
            send(f"http://127.0.0.1:{listener.getsockname()[1]}/", body=body, total_timeout=0.5)
        connection, _ = listener.accept()
        received = 0
        with connection, contextlib.suppress(ConnectionResetError):
            connection.settimeout(20)
            while part := connection.recv(1_000_000):
                received += len(part)
        assert received < len(body)


def test_deadline_covers_the_tls_handshake():
    """The receiver sends the start of a TLS record byte by byte."""

    def drip(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            for byte in b"\x16\x03\x03\x40\x00" + b"\x02" * 500:
                try:
                    connection.sendall(bytes([byte]))
                except OSError:
                    return
                if stop.wait(0.02):
                    return

    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=drip, args=(listener,), daemon=True).start()
        with pytest.raises(client.RequestTimedOut):
            send(f"https://127.0.0.1:{listener.getsockname()[1]}/", total_timeout=0.5, connect_timeout=0.4)
        stop.set()


def test_deadline_covers_a_hanging_look_up(monkeypatch, settings):
    release = threading.Event()
    monkeypatch.setattr(addresses.socket, "getaddrinfo", lambda *args, **kwargs: release.wait(10) or [])
    with pytest.raises(client.RequestFailed, match="resolved in time"):
        send("http://slow.example/", connect_timeout=0.1)
    settings.OUTBOUND_CONNECT_TIMEOUT_SECONDS = 0.1
    with pytest.raises(ValueError, match="resolved in time"):
        client.check_url("http://slow.example/", False)
    release.set()


def test_a_suspension_during_a_connection_is_no_time_out(suspended_look_up):
    """Nothing was sent yet, so the connection begins again."""
    with receiving() as receiver:
        assert send(f"http://good.example:{receiver.port}/", connect_timeout=0.4).status == 200
    assert len(receiver.requests) == 1


@pytest.fixture
def suspended_look_up(monkeypatch):
    """The event loop stands still during the first look-up for longer than a limit of 0.4 s, as in a suspended process.
    The look-up ends a moment after it.
    """
    monkeypatch.setattr(transport, "STOOD_STILL_SECONDS", 0.1)
    looked_up = threading.Event()

    def stand_still() -> None:
        time.sleep(0.8)
        shared.loop.call_later(0.1, looked_up.set)

    def getaddrinfo(host, port, *args, **kwargs):
        if host == "good.example" and not looked_up.is_set():
            shared.loop.call_soon_threadsafe(stand_still)
            looked_up.wait(10)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(addresses.socket, "getaddrinfo", getaddrinfo)


@pytest.fixture
def hanging_names(monkeypatch):
    """Look-ups of *.hang.example hang, others give loopback. Returns the list of the names looked up."""
    release, asked = threading.Event(), []

    def getaddrinfo(host, port, *args, **kwargs):
        asked.append(host)
        if host.endswith("hang.example"):
            release.wait(60)
            raise OSError
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(addresses.socket, "getaddrinfo", getaddrinfo)
    yield asked
    release.set()
    for thread in threading.enumerate():
        if thread.name == "dns-lookup":
            thread.join(30)


def look_up_in_vain(host: str, **changes: str) -> None:
    with pytest.raises(client.RequestFailed, match="resolved in time"):
        send(f"http://{host}/", connect_timeout=0.05, **changes)


def test_hanging_look_ups_do_not_delay_others(hanging_names):
    for number in range(40):
        look_up_in_vain(f"{number}.hang.example")
    with receiving() as receiver:
        assert send(f"http://good.example:{receiver.port}/").status == 200


def test_a_hanging_name_has_one_look_up_at_a_time(hanging_names):
    for _ in range(5):
        look_up_in_vain("hang.example")
    assert hanging_names == ["hang.example"]


def test_the_number_of_concurrent_look_ups_is_limited(hanging_names, monkeypatch):
    monkeypatch.setattr("config.outbound.addresses.OUTBOUND_LOOKUPS_MAX", 2)
    for number in range(3):
        look_up_in_vain(f"{number}.hang.example")
    assert len(hanging_names) == 2
    with pytest.raises(ValueError, match="resolved in time"):
        client.check_url("http://good.example/", False)


def test_one_owners_hanging_names_leave_look_ups_to_others(hanging_names, monkeypatch):
    monkeypatch.setattr("config.outbound.addresses.OUTBOUND_LOOKUPS_PER_USER", 2)
    monkeypatch.setattr("config.outbound.addresses.OUTBOUND_LOOKUPS_MAX", 4)
    for number in range(10):
        look_up_in_vain(f"{number}.hang.example", owner="greedy")
    assert len(hanging_names) == 2
    with receiving() as receiver:
        assert send(f"http://good.example:{receiver.port}/", owner="modest").status == 200
        with pytest.raises(client.RequestFailed, match="resolved in time"):
            send(f"http://good.example:{receiver.port}/", owner="greedy")
