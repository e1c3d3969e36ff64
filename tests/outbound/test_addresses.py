"""The outbound client: which addresses it may connect to."""

import ipaddress
import socket

import pytest

from config.outbound import addresses, client
from tests.outbound.helpers import resolve, send
from tests.webhooks.receiver import answer, receiving

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
    with pytest.raises(client.AddressRefused):
        client.check_url(url, False)
    with pytest.raises(client.AddressRefused):
        send(url, allow_private=False)


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses(address):
    assert addresses.is_public(ipaddress.ip_address(address))
    client.check_url(f"http://[{address}]/" if ":" in address else f"http://{address}/", False)


@pytest.mark.parametrize("host", ODD)
def test_unusual_spellings_of_loopback_are_refused(host):
    url = f"http://{host}/"
    with pytest.raises((client.AddressRefused, ValueError)):
        client.check_url(url, False)
    with pytest.raises((client.AddressRefused, ValueError)):
        send(url, allow_private=False)


def test_refusal_is_not_an_oserror():
    assert not issubclass(client.AddressRefused, OSError)


def test_name_with_one_private_address_is_refused(monkeypatch):
    resolve(monkeypatch, "93.184.215.14", "10.0.0.1")
    with pytest.raises(client.AddressRefused):
        send("http://mixed.example/", allow_private=False)
    with pytest.raises(client.AddressRefused):
        client.check_url("http://mixed.example/", False)


def test_connects_to_the_checked_address_without_a_second_look_up(monkeypatch):
    """A second look-up could return loopback for a name that was public at the check."""
    with receiving(answer()) as receiver:
        monkeypatch.setattr(addresses, "is_public", lambda address: True)
        asked = resolve(monkeypatch, "127.0.0.1")
        reply = send(f"http://rebound.example:{receiver.port}/x", allow_private=False)
        assert reply.status == 200
        assert asked == ["rebound.example"]
        assert receiver.requests[0].header("Host") == f"rebound.example:{receiver.port}"


def test_name_is_checked_again_for_each_connection(monkeypatch):
    """The name resolves to a refused address at the second look-up."""
    found = ["127.0.0.1", "127.0.0.2", "127.0.0.1"]

    def getaddrinfo(host, port, *args, **kwargs):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (found.pop(0), port))]

    monkeypatch.setattr(addresses.socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(addresses, "is_public", lambda address: str(address) == "127.0.0.1")
    with receiving(answer(200, b"ok", "Connection: close\r\n")) as receiver:
        url = f"http://rebound.example:{receiver.port}/"
        assert send(url, allow_private=False, reuse=True).status == 200
        with pytest.raises(client.AddressRefused):
            send(url, allow_private=False, reuse=True)
        assert send(url, allow_private=False, reuse=True).status == 200
        assert (receiver.connections, found) == (2, [])


@pytest.mark.parametrize("found", [["127.0.0.1"], ["127.0.0.2", "127.0.0.1"], ["localhost"], ["::1%lo"]])
def test_socket_is_opened_for_public_addresses_only(monkeypatch, found):
    """The last check is on the address of the socket, so a resolver without checks does no harm."""

    async def unchecked(host, port, **options):
        return [(socket.AF_INET6 if ":" in one else socket.AF_INET, (one, port)) for one in found]

    monkeypatch.setattr(addresses, "resolve", unchecked)
    monkeypatch.setattr(addresses, "is_public", lambda address: str(address) == "127.0.0.2")
    with receiving() as receiver:
        with pytest.raises((client.AddressRefused, client.RequestFailed)):
            send(f"http://trusted.example:{receiver.port}/", allow_private=False)
        assert receiver.connections == 0


@pytest.mark.parametrize("host", ["127.1", "0177.0.0.1", "0x7f.1", "2130706433", "127.0.0.1."])
def test_unusual_spellings_are_normalised(host):
    with receiving() as receiver:
        assert send(f"http://{host}:{receiver.port}/").status == 200
        assert receiver.requests[0].header("Host") == f"127.0.0.1:{receiver.port}"


def test_next_address_is_tried(monkeypatch):
    with receiving(answer()) as receiver:
        resolve(monkeypatch, "127.0.0.2", "127.0.0.1")
        assert send(f"http://two.example:{receiver.port}/").status == 200


@pytest.mark.parametrize(
    "url", ["ftp://127.0.0.1/", "127.0.0.1", "http://u:p@127.0.0.1/", "http://127.0.0.1/\n", "http://[::1", ""]
)
def test_invalid_urls_are_refused(url):
    with pytest.raises(ValueError, match="URL"):
        client.check_url(url, True)
    with pytest.raises(ValueError, match="URL"):
        send(url)


def test_https_only():
    with pytest.raises(ValueError, match="https"):
        send("http://127.0.0.1/", https_only=True)


def test_private_permission_does_not_leak_through_kept_connections(monkeypatch):
    with receiving(answer()) as receiver:
        send(receiver.url, reuse=True)
        with pytest.raises(client.AddressRefused):
            send(receiver.url, reuse=True, allow_private=False)
