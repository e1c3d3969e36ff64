"""The connections of an event loop to the model servers. Staff configure their addresses: private ones are allowed."""

from __future__ import annotations

import asyncio
import os
from weakref import WeakKeyDictionary

import aiohttp

from config.outbound.bounds import CountedRequest, counted_socket
from config.outbound.transport import tls_context

CONNECT_SECONDS = 10.0
# Shorter than that of servers (uvicorn: 5 s): a request on a connection that the server is closing is lost.
KEEPALIVE_SECONDS = 4.0
HEADER_MAX_BYTES = 64 * 1024

# By event loop: connections belong to the loop that opened them.
_sessions: WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession] = WeakKeyDictionary()
os.register_at_fork(after_in_child=_sessions.clear)


def session() -> aiohttp.ClientSession:
    """The running loop's session. It follows no redirects, which would send the key to another server, and keeps no
    cookies. The caller limits the time of a request.
    """
    loop = asyncio.get_running_loop()
    found = _sessions.get(loop)
    if found is None:
        found = _sessions[loop] = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, keepalive_timeout=KEEPALIVE_SECONDS, ssl=tls_context(), socket_factory=counted_socket
            ),
            request_class=CountedRequest,
            timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
            max_line_size=HEADER_MAX_BYTES,
            max_field_size=HEADER_MAX_BYTES,
        )
    return found


async def aclose() -> None:
    found = _sessions.pop(asyncio.get_running_loop(), None)
    if found is not None:
        await found.close()
