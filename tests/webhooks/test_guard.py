"""The outbound guard: what may be reached, and for how long a request may take."""

from __future__ import annotations

import contextlib
import gzip
import ipaddress
import socket
import ssl
import subprocess
import threading
import time

import pytest

from tests.webhooks import receiver as behaviours
from tests.webhooks.receiver import answer, receiving
from webhooks import addresses, guard


def send(url: str, method: str = "POST", **changes):
    arguments = {
        "headers": {},
        "body": b"{}",
        "connect_timeout": 5,
        "total_timeout": 5,
        "max_bytes": 1000,
        "allow_private": True,
    }
    return guard.send(method, url, **{**arguments, **changes})


def resolve(monkeypatch, *found: str):
    """Every name leads to these addresses. Returns the names asked for."""
    asked = []

    def getaddrinfo(host, port, *args, **kwargs):
        asked.append(host)
        return [
            (socket.AF_INET6 if ":" in one else socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in found
        ]

    monkeypatch.setattr(addresses.socket, "getaddrinfo", getaddrinfo)
    return asked


REFUSED = (
    *("0.0.0.0", "0.1.2.3", "10.0.0.1", "100.64.0.1", "100.100.100.200", "127.0.0.1", "127.255.255.254"),
    *("168.63.129.16", "169.254.169.254", "172.16.0.1", "172.31.255.255", "192.0.0.1", "192.0.0.192", "192.0.2.1"),
    *("192.88.99.1", "192.168.1.1", "198.18.0.1", "198.19.255.255", "198.51.100.1", "203.0.113.1", "224.0.0.1"),
    *("239.255.255.255", "240.0.0.1", "255.255.255.255", "::", "::1", "::127.0.0.1", "::8.8.8.8", "::ffff:127.0.0.1"),
    *("::ffff:10.0.0.1", "::ffff:8.8.8.8", "::ffff:0:127.0.0.1", "64:ff9b::7f00:1", "64:ff9b::808:808", "64:ff9b:1::1"),
    *("100::1", "2001::1", "2001:0:4136:e378:8000:63bf:3fff:fdd2", "2001:10::1", "2001:20::1", "2001:db8::1"),
    *("2002:7f00:1::", "2002:808:808::", "3fff::1", "5f00::1", "fc00::1", "fd00:ec2::254", "fe80::1", "fec0::1"),
    *("ff02::1", "ff0e::1"),
)
PUBLIC = (
    *("1.1.1.1", "8.8.8.8", "93.184.215.14", "100.63.255.255", "172.32.0.1", "223.255.255.255"),
    *("2606:4700::1111", "2a00:1450::1"),
)
ODD = ("0177.1", "0x7f000001", "2130706433", "127.1", "0", "localhost", "LOCALHOST", "localhost.", "①②⑦.0.0.1")


@pytest.mark.parametrize("address", REFUSED)
def test_refused_addresses(address):
    assert not addresses.is_public(ipaddress.ip_address(address))
    url = f"http://[{address}]/" if ":" in address else f"http://{address}/"
    with pytest.raises(guard.AddressRefused):
        guard.check_url(url, False)
    with pytest.raises(guard.AddressRefused):
        send(url, allow_private=False)


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses(address):
    assert addresses.is_public(ipaddress.ip_address(address))
    guard.check_url(f"http://[{address}]/" if ":" in address else f"http://{address}/", False)


@pytest.mark.parametrize("host", ODD)
def test_odd_spellings_of_loopback_do_not_get_through(host):
    url = f"http://{host}/"
    with pytest.raises((guard.AddressRefused, ValueError)):
        guard.check_url(url, False)
    with pytest.raises((guard.AddressRefused, ValueError)):
        send(url, allow_private=False)


def test_refusal_is_no_oserror():
    assert not issubclass(guard.AddressRefused, OSError)


def test_one_private_address_among_public_ones_refuses_them_all(monkeypatch):
    resolve(monkeypatch, "93.184.215.14", "10.0.0.1")
    with pytest.raises(guard.AddressRefused):
        send("http://mixed.example/", allow_private=False)
    with pytest.raises(guard.AddressRefused):
        guard.check_url("http://mixed.example/", False)


def test_connects_to_the_checked_address_without_asking_again(monkeypatch):
    """A name that leads to a public address when it is checked and to loopback a moment later gains nothing."""
    with receiving(answer()) as receiver:
        monkeypatch.setattr(addresses, "is_public", lambda address: True)
        asked = resolve(monkeypatch, "127.0.0.1")
        reply = send(f"http://rebound.example:{receiver.port}/x", allow_private=False)
        assert reply.status == 200
        assert asked == ["rebound.example"]
        assert receiver.requests[0].header("Host") == f"rebound.example:{receiver.port}"


def test_name_that_leads_elsewhere_the_second_time_is_refused(monkeypatch):
    """Each new connection looks the name up, and is checked, again."""
    found = ["127.0.0.1", "127.0.0.2", "127.0.0.1"]

    def getaddrinfo(host, port, *args, **kwargs):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (found.pop(0), port))]

    monkeypatch.setattr(addresses.socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(addresses, "is_public", lambda address: str(address) == "127.0.0.1")
    with receiving(answer(200, b"ok", "Connection: close\r\n")) as receiver:
        url = f"http://rebound.example:{receiver.port}/"
        assert send(url, allow_private=False, reuse=True).status == 200
        with pytest.raises(guard.AddressRefused):
            send(url, allow_private=False, reuse=True)
        assert send(url, allow_private=False, reuse=True).status == 200
        assert (receiver.connections, found) == (2, [])


@pytest.mark.parametrize("found", [["127.0.0.1"], ["127.0.0.2", "127.0.0.1"], ["localhost"], ["::1%lo"]])
def test_socket_is_made_for_a_public_address_alone(monkeypatch, found):
    """Whatever a resolver says: what is checked last is what the socket is about to be connected to."""

    async def unchecked(host, port, **options):
        return [(socket.AF_INET6 if ":" in one else socket.AF_INET, (one, port)) for one in found]

    monkeypatch.setattr(guard, "resolve", unchecked)
    monkeypatch.setattr(addresses, "is_public", lambda address: str(address) == "127.0.0.2")
    with receiving() as receiver:
        with pytest.raises((guard.AddressRefused, guard.RequestFailed)):
            send(f"http://trusted.example:{receiver.port}/", allow_private=False)
        assert receiver.connections == 0


@pytest.mark.parametrize("host", ["127.1", "0177.0.0.1", "0x7f.1", "2130706433", "127.0.0.1."])
def test_odd_spellings_are_read_as_the_system_reads_them(host):
    with receiving() as receiver:
        assert send(f"http://{host}:{receiver.port}/").status == 200
        assert receiver.requests[0].header("Host") == f"127.0.0.1:{receiver.port}"


def test_path_and_query_are_sent_as_they_were_written():
    with receiving() as receiver:
        path = "/a%2Fb/%C3%A9;p=1?x=%20+y&z=%E2%82%AC&&t=a/b?c"
        send(f"http://127.0.0.1:{receiver.port}{path}")
        assert receiver.requests[0].path == path


def test_says_nothing_that_the_caller_did_not_say():
    with receiving(answer(200, b"ok", "Set-Cookie: a=b\r\n")) as receiver:
        for _ in range(2):
            send(receiver.url, headers={"X-One": "1"}, reuse=True)
        for request in receiver.requests:
            assert {name.lower() for name, _ in request.headers} == {
                *("host", "accept-encoding", "content-length", "x-one"),
            }


def test_credentials_of_the_environment_are_not_sent(monkeypatch, tmp_path):
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password hush\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with receiving() as receiver:
        send(receiver.url)
        assert receiver.requests[0].header("Authorization") is None


def test_next_address_is_tried(monkeypatch):
    with receiving(answer()) as receiver:
        resolve(monkeypatch, "127.0.0.2", "127.0.0.1")
        assert send(f"http://two.example:{receiver.port}/").status == 200


def test_proxies_of_the_environment_are_ignored(monkeypatch):
    with receiving(answer(200, b"direct")) as receiver, receiving(answer(200, b"proxy")) as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        assert send(receiver.url).body == b"direct"
        assert proxy.connections == 0


def test_redirects_are_answers():
    with receiving(answer()) as target, receiving(behaviours.redirect(target.url)) as receiver:
        reply = send(receiver.url)
        assert (reply.status, reply.headers["location"]) == (302, target.url)
        assert target.connections == 0


@pytest.mark.parametrize(
    "url", ["ftp://127.0.0.1/", "127.0.0.1", "http://u:p@127.0.0.1/", "http://127.0.0.1/\n", "http://[::1", ""]
)
def test_bad_urls(url):
    with pytest.raises(ValueError, match="URL"):
        guard.check_url(url, True)
    with pytest.raises(ValueError, match="URL"):
        send(url)


def test_https_only():
    with pytest.raises(ValueError, match="https"):
        send("http://127.0.0.1/", https_only=True)


@pytest.mark.parametrize("behaviour", [behaviours.hang, behaviours.drip_header, behaviours.drip_body])
@pytest.mark.parametrize("reuse", [False, True])
def test_deadline_covers_header_and_body(behaviour, reuse):
    with receiving(behaviour) as receiver:
        start = time.monotonic()
        with pytest.raises(guard.RequestTimedOut):
            send(receiver.url, total_timeout=0.3, reuse=reuse)
        assert time.monotonic() - start >= 0.29


def test_deadline_covers_sending():
    """A receiver that accepts and reads nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(guard.RequestTimedOut):
        send(f"http://127.0.0.1:{listener.getsockname()[1]}/", body=b"a" * 20_000_000, total_timeout=0.5)


def test_receiver_that_reads_nothing_keeps_no_socket():
    """What could not be sent in time is dropped with the connection: it does not wait in memory to be read."""
    body = b"a" * 20_000_000
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with pytest.raises(guard.RequestTimedOut):
            send(f"http://127.0.0.1:{listener.getsockname()[1]}/", body=body, total_timeout=0.5)
        connection, _ = listener.accept()
        received = 0
        with connection, contextlib.suppress(ConnectionResetError):
            connection.settimeout(20)
            while part := connection.recv(1_000_000):
                received += len(part)
        assert received < len(body)


def test_deadline_covers_the_tls_handshake():
    """A receiver that drips the start of a TLS record."""

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
        with pytest.raises(guard.RequestTimedOut):
            send(f"https://127.0.0.1:{listener.getsockname()[1]}/", total_timeout=0.5, connect_timeout=0.4)
        stop.set()


def test_deadline_covers_a_hanging_look_up(monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(addresses.socket, "getaddrinfo", lambda *args, **kwargs: release.wait(10) or [])
    with pytest.raises(guard.RequestFailed, match="resolved in time"):
        send("http://slow.example/", connect_timeout=0.1)
    with pytest.raises(ValueError, match="resolved in time"):
        guard.check_url("http://slow.example/", False, timeout=0.1)
    release.set()


@pytest.fixture
def hanging_names(monkeypatch):
    """Look-ups of *.hang.example never end, others lead to loopback. Returns what was looked up."""
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
        if thread.name == "webhook-lookup":
            thread.join(30)


def look_up_in_vain(host: str) -> None:
    with pytest.raises(guard.RequestFailed, match="resolved in time"):
        send(f"http://{host}/", connect_timeout=0.05)


def test_names_that_hang_hold_up_no_other(hanging_names):
    for number in range(40):
        look_up_in_vain(f"{number}.hang.example")
    with receiving() as receiver:
        assert send(f"http://good.example:{receiver.port}/").status == 200


def test_a_name_that_hangs_is_looked_up_once_at_a_time(hanging_names):
    for _ in range(5):
        look_up_in_vain("hang.example")
    assert hanging_names == ["hang.example"]


def test_look_ups_at_a_time_are_bounded(hanging_names, settings):
    settings.WEBHOOK_LOOKUPS_MAX = 2
    for number in range(3):
        look_up_in_vain(f"{number}.hang.example")
    assert len(hanging_names) == 2
    with pytest.raises(ValueError, match="resolved in time"):
        guard.check_url("http://good.example/", False)


def test_endless_body_is_cut():
    with receiving(behaviours.endless_body) as receiver:
        reply = send(receiver.url, max_bytes=70_000)
        assert (len(reply.body), reply.truncated) == (70_000, True)


@pytest.mark.parametrize(("size", "truncated"), [(999, False), (1000, False), (1001, True)])
def test_bound_of_the_body(size, truncated):
    with receiving(answer(200, b"a" * size)) as receiver:
        reply = send(receiver.url)
        assert (len(reply.body), reply.truncated) == (min(size, 1000), truncated)


def test_body_that_breaks_off_is_marked():
    with receiving(behaviours.break_off) as receiver:
        reply = send(receiver.url)
        assert (reply.status, reply.body, reply.truncated) == (200, b"partial", True)


def test_packed_answer_is_not_unpacked():
    """The bound on the body is one on the wire: a megabyte of nothing is a kilobyte."""
    packed = gzip.compress(b"a" * 1_000_000, mtime=0)
    with receiving(answer(200, packed, "Content-Encoding: gzip\r\n")) as receiver:
        reply = send(receiver.url, max_bytes=100_000)
        assert (reply.body, reply.truncated) == (packed, False)


def test_long_headers_are_read():
    with receiving(answer(200, b"ok", f"X-Long: {'a' * 30_000}\r\n")) as receiver:
        assert len(send(receiver.url).headers["X-Long"]) == 30_000


def test_endless_header_is_no_answer():
    def endless(receiver, connection, request):
        with contextlib.suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\nX-Long: ")
            while not receiver.stopped.is_set():
                connection.sendall(b"a" * 65536)

    with receiving(endless) as receiver, pytest.raises(guard.RequestFailed, match="not HTTP"):
        send(receiver.url, total_timeout=20)


def test_interim_answer_is_waited_past():
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


def test_connection_with_an_unread_rest_is_not_kept():
    with receiving(answer(200, b"a" * 5000)) as receiver:
        for _ in range(3):
            send(receiver.url, reuse=True)
        assert receiver.connections == 3


def test_kept_connection_that_was_closed_meanwhile_is_not_used():
    closed = threading.Event()

    def answer_then_close(receiver, connection, request):
        answer()(receiver, connection, request)
        behaviours.close(receiver, connection, request)
        closed.set()

    with receiving(answer_then_close, answer()) as receiver:
        assert send(receiver.url, reuse=True).status == 200
        assert closed.wait(10)
        assert send(receiver.url, reuse=True).status == 200


def test_request_that_a_kept_connection_lost_is_not_sent_again():
    with receiving(answer(), behaviours.close) as receiver:
        send(receiver.url, reuse=True)
        with pytest.raises(guard.RequestFailed, match="closed without an answer"):
            send(receiver.url, reuse=True)
        assert len(receiver.requests) == 2


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "POST"])
@pytest.mark.parametrize("reuse", [False, True])
def test_no_request_is_ever_sent_twice(method, reuse):
    """HTTP would allow it for most methods; whoever counts requests does not."""
    with receiving(answer(), behaviours.close) as receiver:
        send(receiver.url, reuse=reuse, method=method)
        with pytest.raises(guard.RequestFailed, match="closed without an answer"):
            send(receiver.url, reuse=reuse, method=method)
        assert len(receiver.requests) == 2
        assert receiver.connections == (1 if reuse else 2)


def test_private_permission_does_not_leak_through_kept_connections(monkeypatch):
    with receiving(answer()) as receiver:
        send(receiver.url, reuse=True)
        with pytest.raises(guard.AddressRefused):
            send(receiver.url, reuse=True, allow_private=False)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("tls")
    key, cert = str(folder / "key.pem"), str(folder / "cert.pem")
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=hooks.example"
    extra = ["-addext", "subjectAltName=DNS:hooks.example", "-keyout", key, "-out", cert]
    subprocess.run([*command.split(), *extra], check=True, capture_output=True)
    return cert, key


@pytest.fixture
def tls_receiver(certificate):
    """Answers 200 over TLS; keeps the server names that clients asked for."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certificate)
    names = []
    context.sni_callback = lambda sock, name, _: names.append(name)
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
                with context.wrap_socket(connection, server_side=True) as secure:
                    while not secure.recv(65536).endswith(b"{}"):
                        continue
                    secure.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            except ssl.SSLError:
                continue
            except OSError:
                return

    threading.Thread(target=serve, daemon=True).start()
    yield listener.getsockname()[1], names
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def test_certificate_is_verified(tls_receiver):
    port, _ = tls_receiver
    with pytest.raises(guard.RequestFailed, match="TLS: self-signed certificate"):
        send(f"https://127.0.0.1:{port}/")


def test_name_of_the_certificate_is_verified(tls_receiver, certificate, monkeypatch):
    port, names = tls_receiver
    guard.tls_context.cache_clear()
    try:
        guard.tls_context().load_verify_locations(certificate[0])
        resolve(monkeypatch, "127.0.0.1")
        assert send(f"https://hooks.example:{port}/").status == 200
        assert names == ["hooks.example"]
        with pytest.raises(guard.RequestFailed, match="TLS: Hostname mismatch"):
            send(f"https://other.example:{port}/")
    finally:
        guard.tls_context.cache_clear()
