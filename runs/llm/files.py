"""Reads the files attached to users' messages for a model: on a thread, for one turn, within limits.

A run's journal holds only their names, so that runs that wait for their tools keep no file in memory. A user has a
share of the threads and of the memory, so that slow or huge files delay only the runs of their own user.
"""

from __future__ import annotations

import base64
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import replace

from django.conf import settings

from chats.attachments import read_file
from chats.media import is_text
from runs.llm.base import AttachedFile, Message, ModelRequest, UserMessage
from runs.tools.places import Places, Threads

# The types that providers accept as they are.
BINARY_TYPES = frozenset({"application/pdf", "image/png", "image/jpeg", "image/gif", "image/webp"})
BYTES_PER_CHAR_MAX = 4


@contextlib.asynccontextmanager
async def with_files(
    request: ModelRequest, user_id: int, threads: Threads, memory: Places
) -> AsyncIterator[ModelRequest]:
    """The request with the content of its files, whose bytes count in ``memory`` until the context ends.

    Raises Unavailable if the storage does not answer in time.
    """
    files = [file for message in request.messages if isinstance(message, UserMessage) for file in message.files]
    if not files:
        yield request
        return
    most = settings.MODEL_ATTACHMENT_TEXT_MAX_CHARS * BYTES_PER_CHAR_MAX + settings.MODEL_ATTACHMENT_MAX_BYTES
    async with memory.hold(user_id, min(sum(file.size_bytes for file in files), most)):
        yield replace(request, messages=await threads.run(user_id, read_files, request.messages))


def read_files(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The messages with the content of their files, those of the newest message first, up to
    MODEL_ATTACHMENT_TEXT_MAX_CHARS and MODEL_ATTACHMENT_MAX_BYTES. Each other file has a note. Blocks for
    ATTACHMENT_READ_SECONDS and one time-out of the storage at most.
    """
    reader = FileReader(settings.MODEL_ATTACHMENT_TEXT_MAX_CHARS, settings.MODEL_ATTACHMENT_MAX_BYTES)
    read: list[Message] = []
    for message in reversed(messages):
        if isinstance(message, UserMessage) and message.files:
            message = replace(message, files=tuple(reader.read(file) for file in message.files))
        read.append(message)
    return tuple(reversed(read))


class FileReader:
    """Reads files until the request has no more room: ``characters`` of text and ``size`` bytes of other files."""

    def __init__(self, characters: int, size: int) -> None:
        self.characters, self.size = characters, size
        self.end = time.monotonic() + settings.ATTACHMENT_READ_SECONDS

    def read(self, file: AttachedFile) -> AttachedFile:
        try:
            if is_text(file.content_type):
                return self._text(file)
            if file.content_type in BINARY_TYPES:
                return self._data(file)
        except FileNotFoundError:
            return replace(file, note="the file no longer exists")
        return replace(file, note="the content of this type cannot be shown")

    def _text(self, file: AttachedFile) -> AttachedFile:
        if not self.characters:
            return replace(file, note="there is no more room for its content")
        # Without a character that the limit divides.
        whole = self._content(file, self.characters * BYTES_PER_CHAR_MAX + 1).decode(errors="ignore")
        text = whole[: self.characters]
        self.characters -= len(text)
        cut = len(text) < len(whole)
        return replace(file, text=text, note=f"only the first {len(text)} characters" if cut else "")

    def _data(self, file: AttachedFile) -> AttachedFile:
        if file.size_bytes > self.size:
            return replace(file, note="it is too large to be shown")
        self.size -= file.size_bytes
        return replace(file, data=base64.b64encode(self._content(file, file.size_bytes)).decode())

    def _content(self, file: AttachedFile, limit: int) -> bytes:
        return read_file(file.stored_name, limit, self.end - time.monotonic())
