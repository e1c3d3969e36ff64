"""The outbound HTTP client, for all requests to addresses that users or staff configure (webhooks, tools).

It resolves a host once, refuses it if any of its addresses is not public, and connects to an address that it has
checked, so that no second look-up can differ. It follows no redirects, uses no proxies of the environment, verifies
certificates and sends no request twice. One deadline covers look-up, connect, handshake, request and answer.
"""

from typing import Any

from django.conf import settings

from config.outbound.addresses import LOOKUP_TIMED_OUT, AddressRefused, LookupFailed, resolve
from config.outbound.loop import shared
from config.outbound.urls import Answer, RequestFailed, RequestTimedOut, host_of, parse, port_of

__all__ = ["AddressRefused", "Answer", "RequestFailed", "RequestTimedOut", "asend", "check_url", "prepare"]


def prepare() -> None:
    """Import what requests need. It takes a tenth of a second: call it before the first request is on an event loop."""
    from config.outbound import transport  # noqa: F401


def check_url(url: str, allow_private: bool, *, https_only: bool = False) -> None:
    """Check that ``asend`` may call ``url`` now. Raises AddressRefused or ValueError, with messages for people. Unless
    ``allow_private``, this looks the host up: the caller must be on a thread, without an open transaction.
    """
    parsed = parse(url, https_only)
    if allow_private:
        return
    try:
        looked_up = shared.submit(resolve(host_of(parsed), port_of(parsed), allow_private=False))
        looked_up.result(settings.OUTBOUND_CONNECT_TIMEOUT_SECONDS)
    except (TimeoutError, LookupFailed) as error:
        raise ValueError(str(error) or LOOKUP_TIMED_OUT) from None


async def asend(method: str, url: str, **options: Any) -> Answer:
    """Send one request and return its answer, also with an error status: ``transport.request`` has the options."""
    from config.outbound import transport

    return await transport.request(method, url, **options)
