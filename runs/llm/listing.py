"""The names of the models that a provider's server lists, for staff. Nothing is asked of a model."""

import asyncio

import aiohttp
from django.conf import settings

from config.kernel.jsontext import from_text
from config.outbound.loop import shared
from runs.catalogue.providers import KINDS, Server
from runs.errors import FailureReason
from runs.llm import registry
from runs.llm.base import ModelError
from runs.llm.connection import session
from runs.llm.http import NOT_VALID, HttpModel
from runs.llm.refusals import refused

# Of the server's answer, of which staff see the first names.
LIST_MAX_BYTES = 4 * 1024 * 1024
NAMES_MAX, NAME_MAX_CHARS = 500, 200


def models_of(server: Server) -> list[str]:
    """Blocks for STAFF_REQUEST_SECONDS at most. Raises ModelError."""
    registry.preload()
    body = shared.submit(_list_of(server)).result()
    return [] if body is None else names_in(body)


async def _list_of(server: Server) -> bytes | None:
    """The server's answer; None of a server that has no list."""
    client = registry.client_for(server)
    if not isinstance(client, HttpModel):
        return None
    url, body = server.base_url + KINDS[server.kind].models_path, bytearray()
    try:
        async with (
            asyncio.timeout(settings.STAFF_REQUEST_SECONDS),
            session().get(
                url, headers=client.headers | {"Accept": "application/json"}, allow_redirects=False
            ) as answer,
        ):
            async for part in answer.content.iter_any():
                body += part
                if len(body) > LIST_MAX_BYTES:
                    raise ModelError(FailureReason.ANSWER_TOO_LONG)
            if answer.status != 200:
                raise refused(answer.status, bytes(body), answer.headers, client.secrets)
            return bytes(body)
    except TimeoutError:
        raise ModelError(FailureReason.TIME_OUT) from None
    except aiohttp.ClientConnectorError as error:
        raise ModelError(FailureReason.PROVIDER_UNREACHABLE, detail=type(error).__name__) from None
    except (aiohttp.ClientError, OSError) as error:
        raise ModelError(FailureReason.CONNECTION_LOST, detail=type(error).__name__) from None


def names_in(body: bytes) -> list[str]:
    """Computes too long for an event loop. Raises ModelError."""
    try:
        names = [item["id"] + "" for item in from_text(body)["data"]]
    except NOT_VALID:
        raise ModelError(FailureReason.MALFORMED_ANSWER, detail="The answer is not a list of models.") from None
    return sorted(name for name in names if 0 < len(name) <= NAME_MAX_CHARS)[:NAMES_MAX]
