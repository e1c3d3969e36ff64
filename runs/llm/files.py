"""The files beside users' messages, read for a model: on a thread, for one turn, within limits.

A run's journal only names them: a thousand runs that wait for their tools hold none in memory.
"""

from __future__ import annotations

import asyncio
import base64
from concurrent.futures import Executor
from dataclasses import replace

from django.conf import settings

from chats.attachments import read_file
from chats.media import is_text
from runs.llm.base import AttachedFile, Message, ModelRequest, UserMessage

# What providers take as it is.
BINARY_TYPES = frozenset({"application/pdf", "image/png", "image/jpeg", "image/gif", "image/webp"})
BYTES_PER_CHAR_MAX = 4


async def with_files(request: ModelRequest, threads: Executor) -> ModelRequest:
    """The request with what its files hold. Raises Unavailable if the storage does not answer."""
    if not any(isinstance(message, UserMessage) and message.files for message in request.messages):
        return request
    messages = await asyncio.get_running_loop().run_in_executor(threads, read_files, request.messages)
    return replace(request, messages=messages)


def read_files(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Blocks. The newest message's files come first, until MODEL_ATTACHMENT_TEXT_MAX_CHARS and
    MODEL_ATTACHMENT_MAX_BYTES are used up; of the others the model is told that they are there.
    """
    room = Room(settings.MODEL_ATTACHMENT_TEXT_MAX_CHARS, settings.MODEL_ATTACHMENT_MAX_BYTES)
    read: list[Message] = []
    for message in reversed(messages):
        if isinstance(message, UserMessage) and message.files:
            message = replace(message, files=tuple(room.fill(file) for file in message.files))
        read.append(message)
    return tuple(reversed(read))


class Room:
    """What still fits into the request."""

    def __init__(self, characters: int, size: int) -> None:
        self.characters, self.size = characters, size

    def fill(self, file: AttachedFile) -> AttachedFile:
        try:
            if is_text(file.content_type):
                return self._text(file)
            if file.content_type in BINARY_TYPES:
                return self._data(file)
        except FileNotFoundError:
            return replace(file, note="the file is gone")
        return replace(file, note="a file of this type can't be shown here")

    def _text(self, file: AttachedFile) -> AttachedFile:
        if not self.characters:
            return replace(file, note="it does not fit here any more")
        # A character that the limit cuts in two is left out.
        whole = read_file(file.stored_name, self.characters * BYTES_PER_CHAR_MAX + 1).decode(errors="ignore")
        text = whole[: self.characters]
        self.characters -= len(text)
        cut = len(text) < len(whole)
        return replace(file, text=text, note=f"only the first {len(text)} characters" if cut else "")

    def _data(self, file: AttachedFile) -> AttachedFile:
        if file.size_bytes > self.size:
            return replace(file, note="it is too large to be shown here")
        self.size -= file.size_bytes
        return replace(file, data=base64.b64encode(read_file(file.stored_name, file.size_bytes)).decode())
