"""The adapter for Anthropic's messages API (ANTHROPIC_BASE_URL)."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import anthropic
from django.conf import settings

from runs.llm.base import AssistantMessage, AttachedFile, Message, ModelRequest, ToolMessage, UserMessage
from runs.llm.http import HttpModel, TurnReader
from runs.llm.transcript import arguments_object, file_text

# The format allows no empty message and begins with a message of the user.
NO_TEXT = "(no text)"


class AnthropicTurn(TurnReader):
    def __init__(self, request: ModelRequest) -> None:
        super().__init__(request)
        self._blocks: dict[Any, Any] = {}

    def read(self, event: dict[str, Any]) -> str:
        match event.get("type"):
            case "content_block_delta":
                return self._delta(event["index"], event["delta"])
            case "content_block_start":
                block = event["content_block"]
                if block["type"] == "tool_use":
                    self._blocks[event["index"]] = self.begin_call(block["id"], block["name"])
                elif block["type"] == "text":
                    return cast(str, block.get("text") or "")
            case "message_start":
                self._count(event["message"].get("usage"))
            case "message_delta":
                self.finish_reason = event["delta"].get("stop_reason") or self.finish_reason
                self._count(event.get("usage"))
            case "message_stop":
                self.ended = True
        return ""

    def _delta(self, index: int, delta: dict[str, Any]) -> str:
        if delta["type"] == "text_delta":
            return cast(str, delta["text"])
        if delta["type"] == "input_json_delta" and index in self._blocks:
            self.add_arguments(self._blocks[index], delta["partial_json"])
        return ""

    def _count(self, usage: dict[str, Any] | None) -> None:
        """Counts are cumulative. Tokens read from or written to a cache are input too."""
        if not usage:
            return
        if type(usage.get("input_tokens")) is int:
            cached = (usage.get("cache_creation_input_tokens") or 0) + (usage.get("cache_read_input_tokens") or 0)
            self.input_tokens = self.count_tokens(usage["input_tokens"] + cached, self.input_tokens)
        self.output_tokens = self.count_tokens(usage.get("output_tokens"), self.output_tokens)


class AnthropicModel(HttpModel):
    """``ModelClient`` of the provider ``anthropic``."""

    path = "/v1/messages"
    sdk: ClassVar[Any] = anthropic
    sdk_client = anthropic.AsyncAnthropic
    sdk_error = anthropic.AnthropicError
    reader = AnthropicTurn

    @staticmethod
    def body(request: ModelRequest) -> dict[str, Any]:
        values: dict[str, Any] = {
            "model": request.model,
            "max_tokens": settings.MODEL_MAX_OUTPUT_TOKENS,
            "messages": messages(request.messages),
            "stream": True,
        }
        if settings.MODEL_SYSTEM_PROMPT:
            values["system"] = settings.MODEL_SYSTEM_PROMPT
        tools = {
            tool.name: {"name": tool.name, "description": tool.description, "input_schema": tool.input_schema}
            for tool in request.tools
        }
        if not tools:
            # A transcript with calls needs their tools, even if staff have disabled all of them since.
            for message in request.messages:
                for call in message.tool_calls if isinstance(message, AssistantMessage) else ():
                    schema = {"type": "object"}
                    tools[call.name] = {
                        "name": call.name,
                        "description": "No longer available.",
                        "input_schema": schema,
                    }
        if tools:
            values["tools"] = list(tools.values())
        return values


def messages(transcript: tuple[Message, ...]) -> list[dict[str, Any]]:
    """Messages of user and assistant in turn, the user first. Consecutive messages of one role become one."""
    merged: list[dict[str, Any]] = []
    for message in transcript:
        role = "assistant" if isinstance(message, AssistantMessage) else "user"
        blocks = _blocks(message)
        if blocks and merged and merged[-1]["role"] == role:
            merged[-1]["content"] += blocks
        elif blocks:
            merged.append({"role": role, "content": blocks})
    if not merged or merged[0]["role"] != "user":
        merged.insert(0, {"role": "user", "content": [{"type": "text", "text": NO_TEXT}]})
    return merged


def _blocks(message: Message) -> list[dict[str, Any]]:
    """The blocks of a message, without blank text, which the format refuses."""
    if isinstance(message, ToolMessage):
        result = {"type": "tool_result", "tool_use_id": message.tool_call_id}
        return [result | {"content": message.content, "is_error": message.is_error}]
    blocks: list[dict[str, Any]] = []
    if isinstance(message, UserMessage):
        blocks += [block for file in message.files for block in _file_blocks(file)]
    if message.text.strip():
        blocks.append({"type": "text", "text": message.text})
    if isinstance(message, AssistantMessage):
        blocks += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments_object(call.arguments)}
            for call in message.tool_calls
        ]
    return blocks


def _file_blocks(file: AttachedFile) -> list[dict[str, Any]]:
    """The file's label and text, and the file itself if it is not text."""
    blocks: list[dict[str, Any]] = [{"type": "text", "text": file_text(file)}]
    if file.data is not None:
        source = {"type": "base64", "media_type": file.content_type, "data": file.data}
        blocks.append({"type": "image" if file.content_type.startswith("image/") else "document", "source": source})
    return blocks
