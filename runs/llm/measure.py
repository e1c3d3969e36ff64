"""The only measure of what a request sends to its model. Three values follow from it, and so always agree: the bound
for which credits are held, the estimated charge if the provider does not count, and the size that fills the window.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from chats.files import is_text
from config.kernel.jsontext import to_text
from runs.catalogue.definitions import KINDS, Dialect
from runs.llm import base
from runs.llm.base import AssistantMessage, AttachedFile, Message, ModelRequest, ToolMessage, ToolSpec
from runs.llm.files import accepted_types
from runs.llm.wire import arguments_object, file_text
from runs.tokens import TextSize

# The most that formats and providers add around a request, and around each message, call, tool and file.
REQUEST_TOKENS = 1000
ITEM_TOKENS = 120
PART_BYTES = 32  # the bytes that a message, call or tool takes in a window beside its text
BYTES_PER_TOKEN = 3  # for the size that fills the window
# Estimated tokens of files that are not text.
IMAGE_TOKENS = 1500
DOCUMENT_TOKENS_MAX = 50_000
MODEL_IMAGE_TOKENS_MAX = 16_384  # the most tokens that a provider counts for one image; credits are held for them
ANY_NUMBER = 10**9  # a document can hold any number of pages in few bytes: it may fill the model's window
EXPONENT = re.compile("[0-9][eE]")


@dataclass(slots=True)
class Size:
    """The size of a request, or of parts of one. ``added``: the most tokens that formats and providers add to the text.
    ``files``: the most tokens of images and documents; ``likely_files``: their estimated tokens. ``beginnings``: the
    request's beginnings as (digest, most tokens). The first one has the instructions and tools, each further one has
    one message more.
    """

    text: TextSize = field(default_factory=TextSize)
    parts: int = 0
    added: int = 0
    files: int = 0
    likely_files: int = 0
    beginnings: list[tuple[str, int]] = field(default_factory=list)

    @property
    def most(self) -> int:
        """An upper bound of the tokens: a token has at least one byte."""
        return REQUEST_TOKENS + self.text.bytes + self.added + self.files

    @property
    def tokens(self) -> int:
        return self.text.tokens + self.likely_files

    @property
    def bytes(self) -> int:
        """About the bytes that the request takes in a window."""
        return self.text.bytes + PART_BYTES * self.parts + BYTES_PER_TOKEN * self.likely_files

    def add_fixed(self, instructions: str, tools: Iterable[ToolSpec]) -> None:
        self._part(instructions)
        for tool in tools:
            self._part(tool.text)

    def add_message(self, message: Message, origin: str | None = None) -> None:
        """Add a message without its files. Reasoning counts if it is of ``origin``, or if ``origin`` is None."""
        if isinstance(message, ToolMessage):
            self._part(message.content)
            return
        self._part(message.text)
        if isinstance(message, AssistantMessage):
            if message.reasoning and origin in (None, message.origin):
                self.text.add(to_text(message.reasoning))
            for call in message.tool_calls:
                self._part(call.name)
                self.text.add(call.arguments)
                # The name counts twice, because a format can also need the tool's definition. Malformed arguments are
                # sent as escaped text in an object, and a number such as 1E15 is sent with all its digits.
                sent = _bytes(arguments_object(call.arguments)) if EXPONENT.search(call.arguments) else 0
                self.added += ITEM_TOKENS + _bytes(call.name) + max(_bytes(call.arguments), sent)
                self.added -= len(call.arguments.encode())

    def add_file(self, file: AttachedFile) -> None:
        """Add a file as it is sent: with its content, or as a note."""
        self._part(file_text(file))
        self.added += ITEM_TOKENS + _bytes(file.name)
        if file.data is None:
            return
        self.files += MODEL_IMAGE_TOKENS_MAX if file.content_type.startswith("image/") else ANY_NUMBER
        self.likely_files += _likely_tokens(file)

    def _part(self, text: str) -> None:
        self.text.add(text)
        self.parts += 1
        self.added += ITEM_TOKENS


def measure(request: ModelRequest) -> Size:
    """The size of a request, whose files must have their content."""
    size, model = Size(), request.model
    reads_all = not KINDS[model.server.kind].is_offline
    digest = hashlib.blake2b(digest_size=16)
    if reads_all:
        size.add_fixed(request.instructions, request.tools)
        if extra := model.parameters.get("extra"):
            size.text.add(to_text(extra))
        fixed = model.server.base_url, model.origin, model.parameters, request.instructions, request.tools
        digest.update(repr(fixed).encode(errors="surrogatepass"))
        size.beginnings.append((digest.hexdigest(), size.most))
    for message in request.messages:
        size.add_message(message, model.origin)
        if not reads_all:
            continue
        if not isinstance(message, AssistantMessage):
            for file in message.files:
                size.add_file(file)
        digest.update(_identity(message).encode(errors="surrogatepass"))
        size.beginnings.append((digest.hexdigest(), size.most))
    return size


def _identity(message: Message) -> str:
    """A text that differs for messages that are sent differently. Files count by name: a stored file never changes."""
    if isinstance(message, AssistantMessage) or not message.files:
        return repr(message)
    files = [(file.stored_name, file.name, file.note, len(file.text or ""), bool(file.data)) for file in message.files]
    return repr((replace(message, files=()), files))


def upper_bound(request: ModelRequest, counted: Mapping[str, int] | None = None, size: Size | None = None) -> int:
    """The most tokens that the provider will count. ``counted``: the provider's counts of requests or beginnings, by
    digest; if a beginning is counted, only what follows it is bounded by its bytes.
    """
    size, counted = size or measure(request), counted or {}
    if KINDS[request.model.server.kind].is_offline:
        return size.tokens
    known = [counted[digest] + size.most - before for digest, before in size.beginnings if digest in counted]
    return min(size.most, *known, request.model.context_tokens)


def estimated_tokens(request: ModelRequest) -> int:
    return min(measure(request).tokens, request.model.context_tokens)


def message_bytes(message: Message) -> int:
    """About the bytes of a message in a window: with a tool's images, without a user's files."""
    size = Size()
    size.add_message(message)
    if isinstance(message, ToolMessage):
        size.likely_files += sum(map(_likely_tokens, message.files))
    return size.bytes


def fixed_bytes(instructions: str, tools: Iterable[ToolSpec]) -> int:
    """About the bytes that the instructions and tools take in a window."""
    size = Size()
    size.add_fixed(instructions, tools)
    return size.bytes


def files_bytes(files: Iterable[AttachedFile], dialect: Dialect) -> int:
    """About the bytes that users' files take in a window, before their content is read."""
    size, characters = Size(), 0
    of_users, _ = accepted_types(dialect)
    for file in files:
        size.add_file(file)
        if is_text(file.content_type):
            characters += file.size_bytes
        elif file.content_type in of_users:
            size.likely_files += _likely_tokens(file)
    return size.bytes + min(characters, base.MODEL_ATTACHMENT_TEXT_MAX_CHARS)


def _likely_tokens(file: AttachedFile) -> int:
    if file.content_type.startswith("image/"):
        return min(IMAGE_TOKENS, MODEL_IMAGE_TOKENS_MAX)
    return min(file.size_bytes // BYTES_PER_TOKEN, DOCUMENT_TOKENS_MAX)


def _bytes(value: Any) -> int:
    return len(to_text(value).encode())
