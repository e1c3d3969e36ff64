"""Each event loop's clients of the model servers, and one tiny request to a model by which staff see that it is set up.

An adapter is imported at its first use, so that a web process never loads one.
"""

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
from runs.llm.base import ModelClient, ModelError, ModelRequest, TextDelta, TurnEnd, UserMessage

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
    from runs.llm import connection

    _clients.pop(asyncio.get_running_loop(), None)
    await connection.aclose()


@dataclass
class Probe:
    """``error`` is None if an answer came; its ``detail`` is the provider's own text, without keys."""

    seconds: float = 0.0
    text: str = ""
    end: TurnEnd | None = None
    error: ModelError | None = None


def probe(model: ModelDefinition) -> Probe:
    """Ask the model. Blocks for STAFF_REQUEST_SECONDS at most; nothing is charged."""
    preload()
    return shared.submit(_ask(model)).result()


async def _ask(model: ModelDefinition) -> Probe:
    question, found, started = (UserMessage(QUESTION),), Probe(), time.monotonic()
    request = ModelRequest(model, question, (), "probe", "probe", turn_index=1, max_output_tokens=OUTPUT_TOKENS)
    try:
        async with asyncio.timeout(settings.STAFF_REQUEST_SECONDS):
            async for event in client_for(model.server).stream(request):
                if isinstance(event, TextDelta):
                    found.text = (found.text + event.text)[:TEXT_MAX_CHARS]
                elif isinstance(event, TurnEnd):
                    found.end = event
    except ModelError as error:
        found.error = error
    except TimeoutError:
        found.error = ModelError(FailureReason.TIME_OUT)
    found.seconds = time.monotonic() - started
    return found
