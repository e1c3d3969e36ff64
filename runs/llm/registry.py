"""Each event loop's clients of the model servers, and one tiny request to a model by which staff see that it is set up.

An adapter is imported at its first use, so that a web process never loads one.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from django.conf import settings
from django.utils.module_loading import import_string

from config.outbound.loop import shared
from runs.catalogue.definitions import ModelDefinition
from runs.catalogue.providers import KINDS, Server
from runs.errors import FailureReason
from runs.llm.base import ModelClient, ModelError, ModelRequest, TextDelta, TurnEnd, Usage, UserMessage

QUESTION = "Answer with the word OK."
# The fewest that every provider accepts.
OUTPUT_TOKENS = 16
TEXT_MAX_CHARS = 500

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


@dataclass(frozen=True)
class Probe:
    """``error`` is None if an answer came. ``detail`` is the provider's own text, without keys."""

    seconds: float
    text: str = ""
    usage: Usage | None = None
    finish_reason: str = ""
    error: FailureReason | None = None
    status: int | None = None
    detail: str = ""


def probe(model: ModelDefinition) -> Probe:
    """Ask the model. Blocks for STAFF_REQUEST_SECONDS at most; nothing is charged."""
    preload()
    return shared.submit(_ask(model)).result()


async def _ask(model: ModelDefinition) -> Probe:
    request = ModelRequest(
        model=model,
        messages=(UserMessage(QUESTION),),
        tools=(),
        run_id="probe",
        chat_id="probe",
        turn_index=1,
        max_output_tokens=OUTPUT_TOKENS,
    )
    started, text, end = time.monotonic(), "", None
    try:
        async with asyncio.timeout(settings.STAFF_REQUEST_SECONDS):
            async for event in client_for(model.server).stream(request):
                if isinstance(event, TextDelta):
                    text += event.text
                elif isinstance(event, TurnEnd):
                    end = event
    except ModelError as error:
        seconds = time.monotonic() - started
        return Probe(seconds, text[:TEXT_MAX_CHARS], error=error.reason, status=error.status, detail=error.detail)
    except TimeoutError:
        return Probe(settings.STAFF_REQUEST_SECONDS, text[:TEXT_MAX_CHARS], error=FailureReason.TIME_OUT)
    usage, finish_reason = (end.usage, end.finish_reason) if end else (None, "")
    return Probe(time.monotonic() - started, text[:TEXT_MAX_CHARS], usage, finish_reason)
