"""The URLs and network addresses that outbound requests may reach, the DNS look-up, and a request's answer or errors.

``ipaddress.is_global`` does not decide, because it treats NAT64, 6to4, IPv4-compatible and multicast addresses as
public. The lists below follow IANA's special-purpose registries: a list of refused blocks for IPv4, and for IPv6 the
global unicast block without refused blocks. HTTP code belongs in ``config.outbound.client``.
"""

import asyncio
import contextlib
import ipaddress
import os
import socket
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from django.conf import settings
from urllib3.exceptions import LocationParseError
from urllib3.util import Url, parse_url

from config.outbound.loop import shared

DEFAULT_PORTS = {"http": 80, "https": 443}
URL_MAX_CHARS = 8 * 1024  # a server may redirect to any address: parsing a very long one would block the event loop
# The most host names that a process looks up at the same time, in all and for one user's tools; further ones fail.
OUTBOUND_LOOKUPS_MAX = 256
OUTBOUND_LOOKUPS_PER_USER = 64

Target = tuple[socket.AddressFamily, tuple]  # family and address, the arguments of socket() and connect()

# The public Internet routes global unicast only. This excludes ::/8 (loopback, IPv4-compatible and -mapped),
# 64:ff9b::/96 (NAT64), fc00::/7, fe80::/10, fec0::/10 and ff00::/8.
_GLOBAL_UNICAST_V6 = ipaddress.IPv6Network("2000::/3")
# 100.64.0.0/10 is carrier-grade NAT and the metadata service of some clouds; 168.63.129.16 is Azure's host agent. The
# blocks of IPv6 lead to embedded IPv4 addresses or are not routed.
_REFUSED = [
    ipaddress.ip_network(block)
    for block in (
        *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "168.63.129.16/32", "169.254.0.0/16"),
        *("172.16.0.0/12", "192.0.0.0/24", "192.0.2.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24"),
        *("192.168.0.0/16", "192.175.48.0/24", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4"),
        *("240.0.0.0/4", "2001::/23", "2001:db8::/32", "2002::/16", "2620:4f:8000::/48", "3fff::/20"),
    )
]

REFUSED = "The host's address is not public."
LOOKUP_TIMED_OUT = "The host name could not be resolved in time."


class AddressRefused(Exception):
    """A request to this address is not allowed. Not an OSError, after which HTTP libraries try the next address."""


class RequestFailed(Exception):
    """No usable answer was received. The message is for people and contains neither the address nor a header."""


class RequestTimedOut(RequestFailed):
    """The deadline passed before the answer was complete."""


@dataclass(frozen=True)
class Answer:
    """``truncated``: the body was longer than ``max_bytes``, or the connection closed before its end."""

    status: int
    headers: Mapping[str, str]
    body: bytes = field(repr=False)
    truncated: bool


def parse(url: str, https_only: bool) -> Url:
    """``url`` as both the check and the connection use it. Raises ValueError."""
    if len(url) > URL_MAX_CHARS:
        raise ValueError("The URL is too long.")
    if any(character <= " " or character in "\\\x7f" for character in url):
        raise ValueError("The URL must not contain spaces, control characters or backslashes.")
    try:
        parsed = parse_url(url)
    except (LocationParseError, ValueError, UnicodeError):
        raise ValueError("This is not a valid URL.") from None
    if parsed.scheme not in DEFAULT_PORTS or not host_of(parsed):
        raise ValueError("The URL must be absolute, with http or https.")
    if https_only and parsed.scheme != "https":
        raise ValueError("The URL must be https.")
    if parsed.auth is not None:
        raise ValueError("The URL must not contain credentials.")
    if parsed.port == 0:
        raise ValueError("This is not a valid URL.")
    return parsed


def same_server(first: str, second: str) -> bool:
    """Whether both URLs have the same scheme, host and port: secrets for one server must not go to another."""
    try:
        one, other = parse(first, False), parse(second, False)
    except ValueError:
        return first == second
    return (one.scheme, host_of(one).lower(), port_of(one)) == (other.scheme, host_of(other).lower(), port_of(other))


def host_of(parsed: Url) -> str:
    """The host for the look-up, so that check and connection read it alike: IPv4 in its usual form, no last dot."""
    host = (parsed.host or "").strip("[]").rstrip(".")
    with contextlib.suppress(OSError):
        return socket.inet_ntoa(socket.inet_aton(host))
    return host


def port_of(parsed: Url) -> int:
    return parsed.port or DEFAULT_PORTS[parsed.scheme or "http"]


def is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    is_routed = address.version == 4 or address in _GLOBAL_UNICAST_V6
    return is_routed and not any(address in block for block in _REFUSED)


async def resolve(host: str, port: int, *, allow_private: bool, owner: str = "") -> list[Target]:
    """All addresses of ``host`` from one look-up, which counts for the ``owner`` (a user). Raises AddressRefused, or
    RequestFailed if the look-up found no address in time.
    """
    targets = await asyncio.wrap_future(_look_up(host, port, owner))
    found = (ipaddress.ip_address(address[0].partition("%")[0]) for _, address in targets)
    if not (allow_private or all(map(is_public, found))):
        raise AddressRefused(REFUSED)
    return targets


def check_url(url: str, allow_private: bool, *, https_only: bool = False) -> None:
    """Check that ``client.asend`` may call ``url`` now. Raises AddressRefused or ValueError, with messages for people.
    Unless ``allow_private``, this looks the host up: the caller must be on a thread, without an open transaction.
    """
    parsed = parse(url, https_only)
    if allow_private:
        return
    try:
        looked_up = shared.submit(resolve(host_of(parsed), port_of(parsed), allow_private=False))
        looked_up.result(settings.OUTBOUND_CONNECT_TIMEOUT_SECONDS)
    except (TimeoutError, RequestFailed) as error:
        raise ValueError(str(error) or LOOKUP_TIMED_OUT) from None


def check_socket_address(text: str) -> None:
    """Raises AddressRefused unless ``text`` is one public address without a zone: ``connect`` would resolve others."""
    if "%" in text or not is_address(text) or not is_public(ipaddress.ip_address(text)):
        raise AddressRefused(REFUSED)


# The look-ups of this process that have not ended, each with the owner for whom it began. The key contains the process
# id, because the threads of a parent process do not run in its fork.
_running_lookups: dict[tuple[int, str, int], tuple[Future[list[Target]], str]] = {}
_lock = threading.Lock()


def _look_up(host: str, port: int, owner: str) -> Future[list[Target]]:
    """Start a look-up on a thread of its own, or join the running one of the same host and port. The system's resolver
    has no time-out, so callers wait with their own limit. Look-ups that do not end use up their owner's share only.
    """
    answer: Future[list[Target]] = Future()
    answer.set_running_or_notify_cancel()  # one waiting caller cannot cancel it for the others
    if is_address(host):
        answer.set_result(_getaddrinfo(host, port))
        return answer
    key = (os.getpid(), host, port)
    with _lock:
        if key in _running_lookups:
            return _running_lookups[key][0]
        owners = [other for _, other in _running_lookups.values()]
        if len(owners) >= OUTBOUND_LOOKUPS_MAX or (owner and owners.count(owner) >= OUTBOUND_LOOKUPS_PER_USER):
            raise RequestFailed(LOOKUP_TIMED_OUT)
        _running_lookups[key] = answer, owner

    def work() -> None:
        try:
            end = partial(answer.set_result, _getaddrinfo(host, port))
        except Exception as error:
            end = partial(answer.set_exception, error)
        with _lock:  # before the end, so that a later caller starts a new look-up
            del _running_lookups[key]
        end()

    threading.Thread(target=work, name="dns-lookup", daemon=True).start()
    return answer


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _getaddrinfo(host: str, port: int) -> list[Target]:
    families = (socket.AF_INET, socket.AF_INET6)
    with contextlib.suppress(OSError, UnicodeError):
        found: list[Any] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        # In the order that the resolver prefers. It may return an address once per protocol.
        if targets := list(dict.fromkeys((family, address) for family, *_, address in found if family in families)):
            return targets
    raise RequestFailed("The host name could not be resolved.")
