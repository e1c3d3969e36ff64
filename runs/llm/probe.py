"""One tiny request to a model, so that staff see whether it is set up."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from django.conf import settings

from config.outbound.loop import shared
from runs.catalogue.definitions import ModelDefinition
from runs.errors import FailureReason
from runs.llm.base import ModelError, ModelRequest, TextDelta, TurnEnd, Usage, UserMessage
from runs.llm.registry import client_for, preload

QUESTION = "Answer with the word OK."
# The fewest that every provider accepts.
OUTPUT_TOKENS = 16
TEXT_MAX_CHARS = 500


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
