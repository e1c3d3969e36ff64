"""Reads, for one turn, the files of users' messages and the images that tools returned. Waiting runs hold only names.
Each user has a share of the threads and of the memory, so that slow or huge files delay only runs of the same user.
"""

import base64
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import replace

from django.conf import settings

from chats.files import is_text, read_file
from config.limits.share import Share, Threads
from runs.catalogue.definitions import Dialect
from runs.llm import base
from runs.llm.base import AssistantMessage, AttachedFile, Message, ModelRequest, UserMessage
from runs.tools import files as tool_files

ATTACHMENT_READ_SECONDS = 60  # time in which the files of one turn must be read

IMAGE_TYPES = frozenset(tool_files.IMAGE_TYPES)
FILE_TYPES = frozenset({"application/pdf"})  # providers accept both as they are
BYTES_PER_CHAR_MAX = 4


@contextlib.asynccontextmanager
async def with_files(
    request: ModelRequest, user_id: int, threads: Threads, memory: Share
) -> AsyncIterator[ModelRequest]:
    """The request with the content of its files, whose bytes count in ``memory`` until the end. Raises Unavailable if
    the storage does not answer in time.
    """
    holders = [message for message in request.messages if not isinstance(message, AssistantMessage)]
    files = [file for message in holders for file in message.files]
    if not files:
        yield request
        return
    most = base.MODEL_ATTACHMENT_TEXT_MAX_CHARS * BYTES_PER_CHAR_MAX + base.MODEL_ATTACHMENT_MAX_BYTES
    async with memory.hold(user_id, min(sum(map(_most_bytes, files)), most)):
        yield replace(request, messages=await threads.run(user_id, read_files, request.messages, request.model.dialect))


def read_files(messages: tuple[Message, ...], dialect: Dialect) -> tuple[Message, ...]:
    """The messages with the content of their files, the newest message's first, or a note why it is missing.
    Blocks for at most ATTACHMENT_READ_SECONDS plus one time-out of the storage.
    """
    reader = FileReader()
    of_users, of_tools = accepted_types(dialect)
    read: list[Message] = []
    for message in reversed(messages):
        if not isinstance(message, AssistantMessage) and message.files:
            accepted = of_users if isinstance(message, UserMessage) else of_tools
            message = replace(message, files=tuple(reader.read(file, accepted) for file in message.files))
        read.append(message)
    return tuple(reversed(read))


def accepted_types(dialect: Dialect) -> tuple[frozenset[str], frozenset[str]]:
    """The types of files that are sent unchanged: for files of users, and for files of tools."""
    images = IMAGE_TYPES if dialect.image_input else frozenset()
    return images | FILE_TYPES if dialect.file_input else images, images if dialect.tool_images else frozenset()


class FileReader:
    """Reads files until the request has no more room: ``characters`` of text and ``size`` bytes of other files."""

    def __init__(self) -> None:
        self.characters, self.size = base.MODEL_ATTACHMENT_TEXT_MAX_CHARS, base.MODEL_ATTACHMENT_MAX_BYTES
        self.end = time.monotonic() + ATTACHMENT_READ_SECONDS

    def read(self, file: AttachedFile, accepted: frozenset[str]) -> AttachedFile:
        """The file with its content, if it is text or has one of the ``accepted`` types; otherwise with a note."""
        try:
            if is_text(file.content_type):
                return self._text(file)
            if file.content_type not in accepted:
                return replace(file, note="the content of this type cannot be shown")
            if _most_bytes(file) > self.size:
                return replace(file, note="it is too large to be shown")
            content = read_file(file.stored_name, _most_bytes(file), self.end - time.monotonic())
        except FileNotFoundError:
            return replace(file, note="the file no longer exists")
        self.size -= len(content)
        return replace(file, size_bytes=len(content), data=base64.b64encode(content).decode())

    def _text(self, file: AttachedFile) -> AttachedFile:
        if not self.characters:
            return replace(file, note="there is no more room for its content")
        # Without the bytes of a character that the limit cuts.
        content = read_file(file.stored_name, self.characters * BYTES_PER_CHAR_MAX + 1, self.end - time.monotonic())
        whole = content.decode(errors="ignore")
        text = whole[: self.characters]
        self.characters -= len(text)
        cut = len(text) < len(whole)
        return replace(file, text=text, note=f"only the first {len(text)} characters" if cut else "")


def _most_bytes(file: AttachedFile) -> int:
    return file.size_bytes or settings.TOOL_ANSWER_MAX_BYTES
