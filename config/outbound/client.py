"""The outbound HTTP client, for all requests to addresses that users or staff configure (webhooks, tools).

It resolves a host once, refuses it if any of its addresses is not public, and connects to an address that it has
checked, so that no second look-up can differ. It follows no redirects, uses no proxies of the environment, verifies
certificates and sends no request twice. One deadline covers look-up, connect, handshake, request and answer.
"""

from typing import Any

from config.outbound.addresses import AddressRefused, Answer, RequestFailed, RequestTimedOut, check_url

__all__ = ["AddressRefused", "Answer", "RequestFailed", "RequestTimedOut", "asend", "check_url", "prepare"]


def prepare() -> None:
    """Import what requests need. It takes a tenth of a second: call it before the first request is on an event loop."""
    from config.outbound import transport  # noqa: F401


async def asend(method: str, url: str, **options: Any) -> Answer:
    """Send one request and return its answer, also with an error status: ``transport.request`` has the options."""
    from config.outbound import transport

    return await transport.request(method, url, **options)
