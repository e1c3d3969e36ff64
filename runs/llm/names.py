"""Names of tools and ids of calls as providers accept them. Those that models made up may have any characters."""

from __future__ import annotations

import hashlib
import re

from runs.llm.base import AssistantMessage, ModelRequest

ACCEPTED = re.compile(r"[A-Za-z0-9_-]{1,64}")
HASH_CHARS = 8
# OpenAI's chat completions refuse a longer id.
ACCEPTED_ID = re.compile(r"[A-Za-z0-9_-]{1,40}")


def wire_name(name: str) -> str:
    """``name``, or a name that every provider accepts and that is the same at every turn."""
    if ACCEPTED.fullmatch(name):
        return name
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)[: 63 - HASH_CHARS] + f"_{_digest(name)[:HASH_CHARS]}"


def wire_id(call_id: str, length: int = 0) -> str:
    """``call_id``, or an id that every provider accepts and that is the same at every turn. With ``length``, it has so
    many letters and digits. The model never repeats an id, so there is no way back.
    """
    if length:
        fits = len(call_id) == length and call_id.isascii() and call_id.isalnum()
        return call_id if fits else _digest(call_id)[:length]
    return call_id if ACCEPTED_ID.fullmatch(call_id) else f"call_{_digest(call_id)[:32]}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


class WireNames:
    """The way back from the names of one request."""

    def __init__(self, request: ModelRequest) -> None:
        names = {tool.name for tool in request.tools}
        for message in request.messages:
            if isinstance(message, AssistantMessage):
                names.update(call.name for call in message.tool_calls)
        self._ours = {wire_name(name): name for name in names if not ACCEPTED.fullmatch(name)}

    def ours(self, name: str) -> str:
        return self._ours.get(name, name)
