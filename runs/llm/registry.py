"""Each event loop's clients of the model servers.

An adapter is imported at its first use, so that a web process never loads one.
"""

from __future__ import annotations

import asyncio
import os
from weakref import WeakKeyDictionary

from django.utils.module_loading import import_string

from runs.catalogue.providers import KINDS, Server
from runs.errors import FailureReason
from runs.llm.base import ModelClient, ModelError

# By event loop and by the server's name. A client is replaced when staff change its server.
_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, tuple[Server, ModelClient]]] = WeakKeyDictionary()
os.register_at_fork(after_in_child=_clients.clear)


def client_for(server: Server) -> ModelClient:
    """The running loop's client of a server, created at its first use.

    Raises ModelError for a server that is not set up.
    """
    clients = _clients.setdefault(asyncio.get_running_loop(), {})
    known, client = clients.get(server.name, (None, None))
    if client is None or known != server:
        if problem := server.problem():
            reason = FailureReason.PROVIDER_MISSING if server.has_key else FailureReason.PROVIDER_KEY_MISSING
            raise ModelError(reason, detail=f"{server.name}: {problem}")
        client = import_string(KINDS[server.kind].adapter)(server)
        clients[server.name] = server, client
    return client


def preload() -> None:
    """Import all adapters. Call it before the event loop runs."""
    for kind in KINDS.values():
        import_string(kind.adapter)


async def aclose_all() -> None:
    """Close the running loop's connections. A later request opens new ones."""
    # Only a process that asks models needs aiohttp.
    from runs.llm import http

    _clients.pop(asyncio.get_running_loop(), None)
    await http.aclose()
