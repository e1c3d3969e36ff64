"""The URL of a request, parsed in one way for the check and for the connection, and the request's answer or error."""

import contextlib
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from urllib3.exceptions import LocationParseError
from urllib3.util import Url, parse_url

DEFAULT_PORTS = {"http": 80, "https": 443}
URL_MAX_CHARS = 8 * 1024  # a server may redirect to any address: parsing a very long one would block the event loop


class RequestFailed(Exception):
    """No answer was received. The message is for people and contains neither the address nor a header."""


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
