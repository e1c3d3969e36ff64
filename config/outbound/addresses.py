"""Which network addresses outbound requests may reach, and the bounded look-up of a host's addresses.

``ipaddress.is_global`` is not the judge here: it takes NAT64, 6to4, IPv4-compatible and multicast addresses for
public ones. The rules are lists of what may be reached (IPv6) and of what may not (IPv4), after IANA's
special-purpose registries.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import Future

from django.conf import settings

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
# (family, socket address), as connect() takes it.
Target = tuple[socket.AddressFamily, tuple]

_REFUSED_V4 = [
    ipaddress.IPv4Network(block)
    for block in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",  # carrier-grade NAT; some clouds keep their metadata service in it
        "127.0.0.0/8",
        "168.63.129.16/32",  # Azure's host agent, behind an address that looks public
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.31.196.0/24",
        "192.52.193.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "192.175.48.0/24",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",
        "240.0.0.0/4",
    )
]
# Only global unicast is routed in public. That leaves out ::/8 (loopback, IPv4-compatible and -mapped), 64:ff9b::/96
# (NAT64), fc00::/7, fe80::/10, fec0::/10 and ff00::/8; of the rest, the special blocks, which lead to embedded IPv4
# addresses or nowhere, are refused.
_GLOBAL_UNICAST_V6 = ipaddress.IPv6Network("2000::/3")
_REFUSED_V6 = [
    ipaddress.IPv6Network(block)
    for block in ("2001::/23", "2001:db8::/32", "2002::/16", "2620:4f:8000::/48", "3fff::/20")
]


REFUSED = "The host's address is not public."
NOT_IN_TIME = "The host name could not be resolved in time."


class AddressRefused(Exception):
    """An address that may not be reached. Not an OSError: HTTP libraries swallow those and try the next address."""


class LookupFailed(Exception):
    """The host has no address, or none was found in time. The message is for people."""


def is_public(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in block for block in _REFUSED_V4)
    return address in _GLOBAL_UNICAST_V6 and not any(address in block for block in _REFUSED_V6)


def find_targets(host: str, port: int, *, allow_private: bool, timeout: float) -> list[Target]:
    """Every address of ``host``, resolved once. Blocks, ``timeout`` seconds at most.

    Raises AddressRefused if any of them is not public (a name with one public and one private address is an attack,
    not a set-up) unless ``allow_private``, and LookupFailed.
    """
    try:
        return _checked(_look_up(host, port).result(max(timeout, 0.001)), allow_private)
    except TimeoutError:
        raise LookupFailed(NOT_IN_TIME) from None


async def resolve(host: str, port: int, *, allow_private: bool, timeout: float | None) -> list[Target]:  # noqa: ASYNC109
    """The same without blocking."""
    try:
        async with asyncio.timeout(timeout):
            return _checked(await asyncio.wrap_future(_look_up(host, port)), allow_private)
    except TimeoutError:
        raise LookupFailed(NOT_IN_TIME) from None


def check_socket_address(text: str) -> None:
    """Whether a socket may be connected to this, as it stands. Raises AddressRefused unless it is one plain public
    address: anything else might still be resolved to another.
    """
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        raise AddressRefused(REFUSED) from None
    if "%" in text or not is_public(address):
        raise AddressRefused(REFUSED)


def _checked(targets: list[Target], allow_private: bool) -> list[Target]:
    if not allow_private and not all(is_public(_address_of(target)) for target in targets):
        raise AddressRefused(REFUSED)
    return targets


def _address_of(target: Target) -> Address:
    return ipaddress.ip_address(target[1][0].partition("%")[0])


# By process (a fork takes no threads along), host and port.
_under_way: dict[tuple[int, str, int], Future[list[Target]]] = {}
_lock = threading.Lock()


def _look_up(host: str, port: int) -> Future[list[Target]]:
    """The system's resolver has no time-out of its own that we could set, so it is waited for from outside.

    Each look-up has a thread of its own: names whose servers hang must not queue up in front of others. A name that is
    being looked up already is waited for together, so a name that hangs keeps one thread however often it is called.
    """
    answer: Future[list[Target]] = Future()
    answer.set_running_or_notify_cancel()  # nobody who waits can cancel it for the others
    if _is_address(host):
        answer.set_result(_getaddrinfo(host, port))
        return answer
    key = (os.getpid(), host, port)
    with _lock:
        if key in _under_way:
            return _under_way[key]
        if len(_under_way) >= settings.OUTBOUND_LOOKUPS_MAX:
            raise LookupFailed(NOT_IN_TIME)
        _under_way[key] = answer

    def work() -> None:
        found: list[Target] = []
        failure: Exception | None = None
        try:
            found = _getaddrinfo(host, port)
        except Exception as error:
            failure = error
        with _lock:  # before anyone hears of it: who asks later looks up anew
            del _under_way[key]
        if failure is None:
            answer.set_result(found)
        else:
            answer.set_exception(failure)

    threading.Thread(target=work, name="webhook-lookup", daemon=True).start()
    return answer


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _getaddrinfo(host: str, port: int) -> list[Target]:
    try:
        found: Sequence[tuple] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise LookupFailed("The host name could not be resolved.") from None
    # sorted by the resolver's preference; a name may be listed once per protocol
    targets = list(dict.fromkeys((family, address) for family, _, _, _, address in found if family in _FAMILIES))
    if not targets:
        raise LookupFailed("The host name could not be resolved.")
    return targets


_FAMILIES = (socket.AF_INET, socket.AF_INET6)
