"""The adapter for OpenAI's chat completions and for other servers with the same API (OPENAI_BASE_URL)."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import openai
from django.conf import settings

from config.kernel.jsontext import to_text
from runs.llm.base import AssistantMessage, AttachedFile, Message, ModelRequest, ToolCall, ToolMessage
from runs.llm.http import HttpModel, TurnReader
from runs.llm.transcript import arguments_object, data_url, file_text


class OpenAITurn(TurnReader):
    def __init__(self, request: ModelRequest) -> None:
        super().__init__(request)
        self._by_index: dict[Any, Any] = {}
        self._last: Any = None

    def is_complete(self) -> bool:
        # Some servers omit the last line. After the finish reason only counts can follow.
        return self.ended or self.finish_reason is not None

    def read(self, event: dict[str, Any]) -> str:
        if usage := event.get("usage"):
            self.input_tokens = self.count_tokens(usage.get("prompt_tokens"), self.input_tokens)
            self.output_tokens = self.count_tokens(usage.get("completion_tokens"), self.output_tokens)
        choices = event.get("choices")
        if not choices:
            return ""
        delta = choices[0].get("delta") or {}
        self.finish_reason = choices[0].get("finish_reason") or self.finish_reason
        for part in delta.get("tool_calls") or ():
            self._read_call(part)
        return cast(str, (delta.get("content") or "") + (delta.get("refusal") or ""))

    def _read_call(self, part: dict[str, Any]) -> None:
        """The index tells calls apart; for servers that omit it or always send 0, a new id does."""
        function = part.get("function") or {}
        call_id, index = part.get("id") or "", part.get("index")
        call = self._by_index.get(index) if index is not None else None if call_id else self._last
        if call is None or (call_id and call.id and call_id != call.id):
            call = self._by_index[index] = self.begin_call(call_id, function.get("name") or "")
        self._last = call
        self.add_arguments(call, function.get("arguments") or "")


class OpenAIModel(HttpModel):
    """``ModelClient`` of the provider ``openai``."""

    path = "/chat/completions"
    sdk: ClassVar[Any] = openai
    sdk_client = openai.AsyncOpenAI
    sdk_error = openai.OpenAIError
    reader = OpenAITurn

    @staticmethod
    def body(request: ModelRequest) -> dict[str, Any]:
        messages = [{"role": "system", "content": settings.MODEL_SYSTEM_PROMPT}] if settings.MODEL_SYSTEM_PROMPT else []
        values: dict[str, Any] = {
            "model": request.model,
            "messages": messages + [_message(message) for message in request.messages],
            "max_completion_tokens": settings.MODEL_MAX_OUTPUT_TOKENS,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if request.tools:
            values["tools"] = [
                {
                    "type": "function",
                    "function": {"name": tool.name, "description": tool.description, "parameters": tool.input_schema},
                }
                for tool in request.tools
            ]
        return values


def _message(message: Message) -> dict[str, Any]:
    if isinstance(message, ToolMessage):
        # The format has no field for a failure, so the text says it.
        content = f"Error: {message.content}" if message.is_error else message.content
        return {"role": "tool", "tool_call_id": message.tool_call_id, "content": content}
    if not isinstance(message, AssistantMessage):
        if not message.files:
            return {"role": "user", "content": message.text}
        parts = [part for file in message.files for part in _file_parts(file)]
        return {"role": "user", "content": [*parts, {"type": "text", "text": message.text}]}
    if not message.tool_calls:
        return {"role": "assistant", "content": message.text}
    calls = [_call(call) for call in message.tool_calls]
    return {"role": "assistant", "content": message.text or None, "tool_calls": calls}


def _file_parts(file: AttachedFile) -> list[dict[str, Any]]:
    """The file's label and text, and the file itself if it is not text."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": file_text(file)}]
    if file.data is not None and file.content_type.startswith("image/"):
        parts.append({"type": "image_url", "image_url": {"url": data_url(file)}})
    elif file.data is not None:
        parts.append({"type": "file", "file": {"filename": file.name, "file_data": data_url(file)}})
    return parts


def _call(call: ToolCall) -> dict[str, Any]:
    # Many servers parse the arguments and refuse the whole transcript if they are malformed.
    arguments = to_text(arguments_object(call.arguments))
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
