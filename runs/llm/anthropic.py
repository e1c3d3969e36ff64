"""The adapter for Anthropic's messages API and for other servers that speak it."""

from dataclasses import replace
from typing import Any

from config.kernel.jsontext import to_text
from runs.catalogue.definitions import Server
from runs.llm.base import AssistantMessage, AttachedFile, Message, ModelRequest, ToolCall, ToolMessage, UserMessage
from runs.llm.http import HttpModel, TurnReader
from runs.llm.wire import arguments_object, file_text, in_order, sampling, sent_id, sent_name

VERSION = "2023-06-01"
NO_TEXT = "(no text)"  # the format allows no empty message and begins with a message of the user
# The budget of tokens for thinking, by ``reasoningEffort``. The provider refuses fewer than THINKING_TOKENS_MIN.
THINKING_TOKENS_MIN = 1024
THINKING_TOKENS = {"minimal": 1024, "low": 2048, "medium": 8192, "high": 16_384, "xhigh": 32_768, "max": 65_536}
# Names of efforts for models that decide themselves how much they think; the other names are the provider's own.
EFFORTS = {"minimal": "low"}


class AnthropicTurn(TurnReader):
    def read(self, event: dict[str, Any]) -> str:
        match event.get("type"):
            case "content_block_delta":
                return self._delta(event["index"], event["delta"])
            case "content_block_start":
                return self._begin_block(event["index"], event["content_block"])
            case "message_start":
                self._count(event["message"].get("usage"))
            case "message_delta":
                self._end(event["delta"])
                self._count(event.get("usage"))
            case "message_stop":
                self.ended = True
        return ""

    def read_document(self, document: dict[str, Any]) -> str:
        text = "".join([self._begin_block(index, block) for index, block in enumerate(document["content"])])
        self._end(document)
        self._count(document.get("usage"))
        return text

    def _begin_block(self, index: int, block: dict[str, Any]) -> str:
        if block["type"] == "tool_use":
            call = self.calls[index] = self.begin_call(block["id"], block["name"])
            # Usually empty; some servers send the whole input here.
            call.given = to_text(block["input"]) if block.get("input") else ""
            self.grow(call.given)
        elif block["type"] in ("thinking", "redacted_thinking"):
            # The start of a block can be empty; then the answer has not begun.
            self.grow(block.get("thinking") or block.get("data") or "", kept=len(to_text(block)))
            self.thoughts[index] = dict(block)
            self.keep(self.thoughts[index])
        elif block["type"] == "text":
            return self.text(block.get("text") or "")
        return ""

    def _delta(self, index: int, delta: dict[str, Any]) -> str:
        kind = delta["type"]
        if kind == "text_delta":
            return self.text(delta["text"])
        if kind == "input_json_delta" and index in self.calls:
            self.add_arguments(self.calls[index], delta["partial_json"])
        elif kind in ("thinking_delta", "signature_delta") and index in self.thoughts:
            field = kind.removesuffix("_delta")
            self.grow(delta[field])
            block = self.thoughts[index]
            block[field] = block.get(field, "") + delta[field]
        return ""

    def _end(self, end: dict[str, Any]) -> None:
        self.say_reason(end.get("stop_reason"))
        self.finish_detail = str((end.get("stop_details") or {}).get("explanation") or "")

    def _count(self, usage: dict[str, Any] | None) -> None:
        """Our input tokens include those that are read from or written to a cache; the provider's do not."""
        if not usage:
            return
        self.count(
            cached_tokens=usage.get("cache_read_input_tokens"),
            cache_write_tokens=usage.get("cache_creation_input_tokens"),
            output_tokens=usage.get("output_tokens"),
            reasoning_tokens=(usage.get("output_tokens_details") or {}).get("thinking_tokens"),
        )
        if type(usage.get("input_tokens")) is int:
            cached = self.counts["cached_tokens"] + self.counts["cache_write_tokens"]
            self.count(input_tokens=usage["input_tokens"] + cached)


class AnthropicModel(HttpModel):
    path = "/v1/messages"
    count_path = "/v1/messages/count_tokens"
    counted_fields = ("model", "messages", "system", "tools", "tool_choice", "thinking")
    reader = AnthropicTurn

    def __init__(self, server: Server) -> None:
        super().__init__(replace(server, base_url=server.base_url.removesuffix("/v1")))
        self.headers.setdefault("anthropic-version", VERSION)

    def key_headers(self) -> dict[str, str]:
        return {"x-api-key": self.server.api_key}

    @staticmethod
    def fields(request: ModelRequest) -> dict[str, Any]:
        model, tools = request.model, _tools(request)
        origin = model.origin if model.dialect.reasoning_back else None
        one_call = {"type": "auto", "disable_parallel_tool_use": True}
        values: dict[str, Any] = {
            "model": model.provider_model,
            "max_tokens": request.max_output_tokens,
            "messages": messages(request.messages, origin),
            "stream": True,
            "system": [_text(request.instructions)] if request.instructions.strip() else None,
            "tools": tools or None,
            "tool_choice": one_call if tools and model.dialect.parallel_tool_calls is False else None,
            "stop_sequences": model.parameters.get("stop"),
            **(_thinking(request) or sampling(request, temperature="temperature", top_p="topP")),
        }
        if model.dialect.prompt_cache_key:
            _add_breakpoints(values)
        return values


def _thinking(request: ModelRequest) -> dict[str, Any]:
    effort = request.model.parameters.get("reasoningEffort", "none")
    if request.model.dialect.adaptive_thinking:
        if effort == "none":
            return {}
        return {"thinking": {"type": "adaptive"}, "output_config": {"effort": EFFORTS.get(effort, effort)}}
    # The output limit includes the thinking: half of it is left to the answer.
    budget = min(THINKING_TOKENS.get(effort, 0), request.max_output_tokens // 2)
    if budget < THINKING_TOKENS_MIN or _is_without_thinking(request):
        return {}
    return {"thinking": {"type": "enabled", "budget_tokens": budget}}


def _is_without_thinking(request: ModelRequest) -> bool:
    """Whether the turn continues calls whose thinking is not sent back, such as those of another model. After a turn
    with calls, the provider refuses to think unless that turn begins with the model's own thinking.
    """
    last = next((message for message in reversed(request.messages) if not isinstance(message, ToolMessage)), None)
    if not isinstance(last, AssistantMessage) or not last.tool_calls:
        return False
    return last.origin != request.model.origin or not last.reasoning or not request.model.dialect.reasoning_back


def _tools(request: ModelRequest) -> list[dict[str, Any]]:
    schema = {"type": "object"}  # the format refuses one without a type
    tools = [
        {"name": sent_name(tool.name), "description": tool.description, "input_schema": schema | tool.input_schema}
        for tool in request.tools
    ]
    if tools:
        return tools
    # A transcript with calls needs the definitions of their tools, even if staff have disabled all of them.
    earlier = (message for message in request.messages if isinstance(message, AssistantMessage))
    names = dict.fromkeys(sent_name(call.name) for message in earlier for call in message.tool_calls)
    return [{"name": name, "description": "No longer available.", "input_schema": schema} for name in names]


def _add_breakpoints(values: dict[str, Any]) -> None:
    """Mark where the provider's cache may end: after the tools, the instructions, and each of the last two steps."""
    # Two steps, because the next request still contains the first of them.
    steps = [message["content"] for message in values["messages"] if message["role"] == "user"]
    for blocks in (values.get("tools"), values.get("system"), *steps[-2:]):
        if blocks:
            blocks[-1] = blocks[-1] | {"cache_control": {"type": "ephemeral"}}


def messages(transcript: tuple[Message, ...], origin: str | None) -> list[dict[str, Any]]:
    """Messages of user and assistant in turn; the user's come first and last. Only reasoning of ``origin`` is sent."""
    merged: list[dict[str, Any]] = []
    for message in transcript:
        role = "assistant" if isinstance(message, AssistantMessage) else "user"
        blocks = _blocks(message, origin)
        if blocks and merged and merged[-1]["role"] == role:
            merged[-1]["content"] += blocks
        elif blocks:
            merged.append({"role": role, "content": blocks})
    for place in (0, -1):
        if not merged or merged[place]["role"] != "user":
            merged.insert(len(merged) if place else 0, {"role": "user", "content": [_text(NO_TEXT)]})
    return merged


def _blocks(message: Message, origin: str | None) -> list[dict[str, Any]]:
    """The blocks of a message, without blank text, which the format refuses."""
    if isinstance(message, ToolMessage):
        content = [_text(message.content)] if message.content.strip() else []
        content += [block for file in message.files for block in _file_blocks(file)]
        result = {"type": "tool_result", "tool_use_id": sent_id(message.tool_call_id)}
        return [result | {"content": content if message.files else message.content, "is_error": message.is_error}]
    if isinstance(message, UserMessage):
        files = [block for file in message.files for block in _file_blocks(file)]
        return [*files, _text(message.text)] if message.text.strip() else files
    blocks = list[dict[str, Any]]()
    for part in in_order(message, origin):
        if isinstance(part, ToolCall):
            name, input = sent_name(part.name), arguments_object(part.arguments)
            blocks.append({"type": "tool_use", "id": sent_id(part.id), "name": name, "input": input})
        elif not isinstance(part, str):
            blocks.append(part)
        elif part.strip():
            blocks.append(_text(part))
    return blocks


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _file_blocks(file: AttachedFile) -> list[dict[str, Any]]:
    """The file's label and text, and the file itself if it is not text."""
    blocks = [_text(file_text(file))]
    if file.data is not None:
        source = {"type": "base64", "media_type": file.content_type, "data": file.data}
        blocks.append({"type": "image" if file.content_type.startswith("image/") else "document", "source": source})
    return blocks
