"""The adapter for OpenAI's Responses API, without state at the provider: each turn sends the whole transcript."""

import re
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from config.kernel.jsontext import to_text
from runs.catalogue.definitions import Server
from runs.errors import FailureReason
from runs.llm import base, wire
from runs.llm.base import AttachedFile, ModelError, ModelRequest, ToolCall, ToolMessage, UserMessage
from runs.llm.http import HttpModel, TurnReader
from runs.llm.refusals import stopped

ENCRYPTED = "reasoning.encrypted_content"
# Names of OpenAI's models that do not reason: they refuse the request to include encrypted reasoning.
PLAIN_MODEL = re.compile(r"(?:^|/)(?:gpt-[34]|chatgpt|gpt-[5-9][\d.]*-chat)")
# The text of that refusal, by which models with other names are recognised.
REFUSES_ENCRYPTED = re.compile("encrypted|include", re.IGNORECASE)


class ResponsesTurn(TurnReader):
    # A call's arguments come in parts, and then once more as a whole.
    def read(self, event: dict[str, Any]) -> str:
        match event.get("type"):
            case "response.output_text.delta" | "response.refusal.delta":
                return self.text(event["delta"])
            case "response.output_item.added":
                self._begin_item(_index(event), event["item"])
            case "response.function_call_arguments.delta":
                self.add_arguments(self.calls[_index(event)], event["delta"])
            case "response.reasoning_text.delta" | "response.reasoning_summary_text.delta":
                self.grow(event["delta"])
            case "response.output_item.done":
                self._finish_item(_index(event), event["item"])
            case "response.completed" | "response.incomplete" if not self.has_begun and event["response"].get("output"):
                return self.read_document(event["response"])  # a server that streams nothing
            case "response.completed" | "response.incomplete" | "response.failed":
                self._end(event["response"])
            case "error":
                raise stopped({"error": event}, self.secrets)
        return ""

    def read_document(self, document: dict[str, Any]) -> str:
        text = ""
        for index, item in enumerate(document["output"]):
            self._begin_item(index, item)
            if item["type"] == "message":
                text += self.text("".join([part.get("text") or part.get("refusal") or "" for part in item["content"]]))
            self._finish_item(index, item)
        self._end(document)
        return text

    def _begin_item(self, index: Any, item: dict[str, Any]) -> None:
        if item["type"] == "function_call":
            self.calls[index] = self.begin_call(item["call_id"], item["name"])
        elif item["type"] == "message" and item.get("phase"):
            self.keep({"phase": item["phase"]})

    def _finish_item(self, index: Any, item: dict[str, Any]) -> None:
        if item["type"] == "reasoning":
            # The provider does not accept ``status`` back. Without its encrypted content, the item is of no use.
            if item.get("encrypted_content"):
                self.grow(to_text(item))
                self.keep({name: value for name, value in item.items() if name != "status" and value is not None})
        elif item["type"] == "function_call":
            call = self.calls.get(index) or self.begin_call(item["call_id"], item["name"])
            if not any(call.arguments):
                self.add_arguments(call, item["arguments"])

    def _end(self, response: dict[str, Any]) -> None:
        usage = response.get("usage") or {}
        details = usage.get("input_tokens_details") or {}
        self.count(
            input_tokens=usage.get("input_tokens"),
            output_tokens=usage.get("output_tokens"),
            cached_tokens=details.get("cached_tokens"),
            cache_write_tokens=details.get("cache_write_tokens"),
            reasoning_tokens=(usage.get("output_tokens_details") or {}).get("reasoning_tokens"),
        )
        match response.get("status"):
            case "failed":
                raise stopped({"error": response.get("error") or {}}, self.secrets)
            case "incomplete":
                self.say_reason((response.get("incomplete_details") or {}).get("reason"))
            case "cancelled":
                raise ModelError(FailureReason.CONNECTION_LOST, detail="The provider cancelled the answer.")
            case "completed":
                self.finish_reason = "max_output_tokens" if self._was_cut() else "completed"
        self.ended = True

    def _was_cut(self) -> bool:
        """Whether an answer with the status "completed" reached the output limit: llama.cpp does not report that."""
        if self.counts["output_tokens"] < self.request.max_output_tokens:
            return False
        last = self._calls[-1] if self._calls else None
        return last is None or wire.MALFORMED_ARGUMENTS in wire.arguments_object("".join(last.arguments))


def _index(event: dict[str, Any]) -> Any:
    """The index of an event's output item, or its id: llama.cpp sends no index, and for calls only ``call_id``."""
    item = event.get("item") or {}
    return event.get("output_index", event.get("item_id") or item.get("id") or item.get("call_id"))


class ResponsesModel(HttpModel):
    path = "/responses"
    count_path = "/responses/input_tokens"
    counted_fields = ("model", "input", "instructions", "tools", "parallel_tool_calls", "reasoning")
    reader = ResponsesTurn

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        # The models that have refused encrypted reasoning: behind Azure and proxies, names do not show which.
        self.plain_models: set[str] = set()

    async def stream(self, request: ModelRequest) -> AsyncIterator[base.ModelEvent]:
        model = request.model
        plain = replace(request, model=replace(model, dialect=replace(model.dialect, reasoning_back=False)))
        if model.provider_model not in self.plain_models:
            try:
                async for event in super().stream(request):
                    yield event
                return
            except ModelError as error:
                refuses = error.status in (400, 422) and REFUSES_ENCRYPTED.search(error.detail)
                if not refuses or "include" not in self.body(request):
                    raise
        async for event in super().stream(plain):
            self.plain_models.add(model.provider_model)
            yield event

    @staticmethod
    def fields(request: ModelRequest) -> dict[str, Any]:
        model, dialect = request.model, request.model.dialect
        origin = model.origin if dialect.reasoning_back else None
        encrypted = dialect.reasoning_back and not PLAIN_MODEL.search(model.provider_model)
        effort = model.parameters.get("reasoningEffort")
        tools = [{"type": "function", "strict": False} | wire.function_of(tool) for tool in request.tools]
        return {
            "model": model.provider_model,
            "input": [item for message in request.messages for item in _items(message, origin)],
            "max_output_tokens": request.max_output_tokens,
            "stream": True,
            "store": False,
            "include": [ENCRYPTED] if encrypted else None,
            "instructions": request.instructions or None,
            "prompt_cache_key": request.chat_id if dialect.prompt_cache_key else None,
            **wire.sampling(request, temperature="temperature", top_p="topP"),
            "reasoning": {"effort": effort} if effort else None,
            "tools": tools or None,
            "parallel_tool_calls": dialect.parallel_tool_calls if tools else None,
        }


def _items(message: base.Message, origin: str | None) -> list[dict[str, Any]]:
    if isinstance(message, ToolMessage):
        # The format has no field for a failure, so the text says it.
        text = f"Error: {message.content}" if message.is_error else message.content
        output: str | list[dict[str, Any]] = text
        if message.files:
            output = [{"type": "input_text", "text": text}]
            output += [part for file in message.files for part in _file_parts(file)]
        return [{"type": "function_call_output", "call_id": wire.sent_id(message.tool_call_id), "output": output}]
    if isinstance(message, UserMessage):
        parts = [part for file in message.files for part in _file_parts(file)]
        if message.text or not parts:
            parts.append({"type": "input_text", "text": message.text})
        return [{"role": "user", "content": parts}]
    items, phase = list[dict[str, Any]](), dict[str, Any]()
    for part in wire.in_order(message, origin):
        if isinstance(part, str):
            items.append({"role": "assistant", "content": part} | phase)
        elif isinstance(part, ToolCall):
            arguments = to_text(wire.arguments_object(part.arguments))
            call = {"type": "function_call", "call_id": wire.sent_id(part.id), "name": wire.sent_name(part.name)}
            items.append(call | {"arguments": arguments})
        elif "phase" in part:
            phase = part
        else:
            items.append(part)
    return items


def _file_parts(file: AttachedFile) -> list[dict[str, Any]]:
    """The file's label and text, and the file itself if it is not text."""
    parts: list[dict[str, Any]] = [{"type": "input_text", "text": wire.file_text(file)}]
    if file.data is not None and file.content_type.startswith("image/"):
        parts.append({"type": "input_image", "image_url": wire.data_url(file), "detail": "auto"})
    elif file.data is not None:
        parts.append({"type": "input_file", "filename": file.name, "file_data": wire.data_url(file)})
    return parts
