"""The clients of model servers, and the two requests by which staff check a server: for the names of its models, and
for a model's answer. An adapter is imported at its first use, because web processes need none for their own work.
"""

import asyncio
import time
from functools import lru_cache
from typing import Any

from django.conf import settings
from django.utils.module_loading import import_string

from config.kernel.jsontext import from_text
from config.outbound import client as outbound
from config.outbound.loop import shared
from runs.catalogue.definitions import KINDS, ModelDefinition, Server
from runs.errors import FailureReason
from runs.llm.base import ModelClient, ModelError, ModelRequest, TurnEnd, UserMessage
from runs.llm.refusals import refused

CLIENTS_MAX = 64  # a changed server has a new client
OUTPUT_TOKENS = 16  # the smallest output limit that every provider accepts
TEXT_MAX_CHARS = 500
# Limits of the list of a server's models: its bytes, and the names that staff see.
LIST_MAX_BYTES = 4 * 1024 * 1024
NAMES_MAX, NAME_MAX_CHARS = 500, 200


@lru_cache(maxsize=CLIENTS_MAX)
def client_for(server: Server) -> ModelClient:
    """The client of a server. Raises ModelError for a server that is not set up."""
    if problem := server.problem():
        reason = FailureReason.PROVIDER_MISSING if server.has_key else FailureReason.PROVIDER_KEY_MISSING
        raise ModelError(reason, detail=f"{server.name}: {problem}")
    client: ModelClient = import_string(KINDS[server.kind].adapter)(server)
    return client


def preload() -> None:
    """Import all adapters. Call it before the event loop runs."""
    for kind in KINDS.values():
        import_string(kind.adapter)


def probe(model: ModelDefinition) -> dict[str, Any]:
    """Ask the model. Blocks for STAFF_REQUEST_SECONDS at most; nothing is charged. For the template: ``seconds``,
    ``text``, and ``end`` (a TurnEnd) or ``error``, whose ``detail`` is the provider's own text, without keys.
    """
    preload()
    return shared.submit(_ask(model)).result()


async def _ask(model: ModelDefinition) -> dict[str, Any]:
    messages, found, started = (UserMessage("Answer with the word OK."),), dict[str, Any](text=""), time.monotonic()
    request = ModelRequest(model, messages, (), "probe", turn_index=1, max_output_tokens=OUTPUT_TOKENS)
    try:
        async with asyncio.timeout(settings.STAFF_REQUEST_SECONDS):
            async for event in client_for(model.server).stream(request):
                if isinstance(event, str):
                    found["text"] = (found["text"] + event)[:TEXT_MAX_CHARS]
                elif isinstance(event, TurnEnd):
                    found["end"] = event
    except ModelError as error:
        found["error"] = error
    except TimeoutError:
        found["error"] = ModelError(FailureReason.TIME_OUT)
    return found | {"seconds": time.monotonic() - started}


def models_of(server: Server) -> list[str]:
    """The names of the models that the server lists. Blocks for STAFF_REQUEST_SECONDS at most. Raises ModelError."""
    client: Any = client_for(server)
    path = KINDS[server.kind].models_path  # every kind with a ``models_path`` is an HttpModel
    if not path:
        return []
    request = outbound.asend(
        "GET",
        client.server.base_url + path,
        headers=client.headers | {"Accept": "application/json"},
        total_timeout=settings.STAFF_REQUEST_SECONDS,
        max_bytes=LIST_MAX_BYTES,
        allow_private=True,
    )
    try:
        answer = shared.submit(request).result()
    except outbound.RequestTimedOut:
        raise ModelError(FailureReason.TIME_OUT) from None
    except outbound.RequestFailed as error:
        raise ModelError(FailureReason.PROVIDER_UNREACHABLE, detail=str(error)) from None
    if answer.status != 200:
        raise refused(answer.status, answer.body, answer.headers, client.secrets)
    return names_in(answer.body)


def names_in(body: bytes) -> list[str]:
    """The names in a list of models, sorted. Takes too long for an event loop. Raises ModelError."""
    try:
        names = [item["id"] + "" for item in from_text(body)["data"]]
    except (ValueError, ArithmeticError, TypeError, LookupError, RecursionError):
        raise ModelError(FailureReason.MALFORMED_ANSWER, detail="The answer is not a list of models.") from None
    return sorted(name for name in names if 0 < len(name) <= NAME_MAX_CHARS)[:NAMES_MAX]
