"""The adapter for OpenAI's chat completions and for the many servers with the same API, each with its dialect."""

from typing import Any

from config.kernel.jsontext import to_text
from runs.catalogue.definitions import Dialect
from runs.llm import wire
from runs.llm.base import AssistantMessage, AttachedFile, ModelRequest, ToolCall, ToolMessage, UserMessage
from runs.llm.http import Call, HttpModel, TurnReader

REASONING_TEXT = "reasoning_content"
EXTRA_CONTENT = "extra_content"  # the field of a call in which Gemini sends a signature, and wants it back
# The value of this field that Gemini accepts for calls of other models.
NO_SIGNATURE = {"google": {"thought_signature": "skip_thought_signature_validator"}}
# The fields of a message in which reasoning is looked for, by the dialect's ``reasoning_field``. For another name, that
# field alone is read. vLLM renamed ``reasoning_content``.
READ_FIELDS = {REASONING_TEXT: (REASONING_TEXT, "reasoning"), EXTRA_CONTENT: (), "": ()}


class OpenAITurn(TurnReader):
    _last: Any = None  # the call to which the last part of a call belonged

    def read(self, event: dict[str, Any]) -> str:
        if usage := event.get("usage"):
            self._count(usage)
        choices = event.get("choices")
        if not choices:
            return ""
        self.say_reason(choices[0].get("finish_reason"))
        return self._read_message(choices[0].get("delta") or choices[0].get("message") or {})

    def _count(self, usage: dict[str, Any]) -> None:
        details = usage.get("prompt_tokens_details") or {}
        self.count(
            input_tokens=usage.get("prompt_tokens"),
            output_tokens=usage.get("completion_tokens"),
            # DeepSeek has a field of its own.
            cached_tokens=details.get("cached_tokens", usage.get("prompt_cache_hit_tokens")),
            cache_write_tokens=details.get("cache_write_tokens"),
            reasoning_tokens=(usage.get("completion_tokens_details") or {}).get("reasoning_tokens"),
        )
        prompt, output, total = (usage.get(f"{name}_tokens") for name in ("prompt", "completion", "total"))
        if type(prompt) is type(output) is type(total) is int and prompt > 0:
            # xAI and Gemini count reasoning in the total alone. Other servers count there what a cache had.
            hidden = self.counts["reasoning_tokens"] or (0 if self.counts["cached_tokens"] else total)
            self.count(output_tokens=min(output + hidden, total - prompt))

    def _read_message(self, message: dict[str, Any]) -> str:
        named = self.request.model.dialect.reasoning_field
        for field in READ_FIELDS.get(named, (named,)):
            if reasoning := message.get(field):
                self._reason(field, reasoning)
                break
        for part in message.get("tool_calls") or ():
            self._read_call(part)
        content, text = message.get("content") or "", ""
        for part in content if isinstance(content, list) else ():
            if part.get("type") == "thinking":  # Mistral
                self._reason("content", [part])
            else:
                text += part.get("text") or part.get("refusal") or ""
        return self.text((text if isinstance(content, list) else content) + (message.get("refusal") or ""))

    def _reason(self, field: str, value: str | list[dict[str, Any]]) -> None:
        """Record reasoning, a text or a list of items, for the same field later."""
        self.grow(value if isinstance(value, str) else to_text(value))
        if not self.request.model.dialect.reasoning_back:
            return
        if not self.reasoning or self.reasoning[-1]["field"] != field:
            self.reasoning.append({"field": field, "value": value[:0]})
        last = self.reasoning[-1]
        if isinstance(value, str):
            last["value"] += value
        else:
            for item in value:
                _add_item(last["value"], item)

    def _read_call(self, part: dict[str, Any]) -> None:
        """The index distinguishes calls. Some servers omit it or always send 0. Then a name with a new id begins a
        call, and without ids a name after a whole call.
        """
        function = part.get("function") or {}
        call_id, index, name = part.get("id") or "", part.get("index"), function.get("name") or ""
        call = self._last if index is None else self.calls.get(index)
        is_other = index is None or call is None or call.id not in ("", call_id)
        if call is None or (name and (is_other if call_id else _is_whole(call))):
            call = self.calls[index] = self.begin_call(call_id, name)
        self._last = call
        arguments = function.get("arguments") or ""
        # Some servers send the arguments as an object.
        self.add_arguments(call, to_text(arguments) if isinstance(arguments, dict) else arguments)
        extra, dialect = part.get(EXTRA_CONTENT), self.request.model.dialect
        if extra and dialect.reasoning_back and dialect.reasoning_field == EXTRA_CONTENT:
            self.grow(to_text(extra))
            self.reasoning.append({"field": EXTRA_CONTENT, "value": extra, "call": len(self._calls) - 1})


def _is_whole(call: Call) -> bool:
    """Whether the call came with its arguments as one part, which is parsed once, however many parts follow."""
    if len(call.arguments) != 1:
        return False
    if call.begins_whole is None:
        call.begins_whole = wire.MALFORMED_ARGUMENTS not in wire.arguments_object(call.arguments[0])
    return call.begins_whole


def _add_item(items: list[dict[str, Any]], part: dict[str, Any]) -> None:
    """Add a part of a list of reasoning. A part with the type and the index of the last item belongs to that item: its
    texts are appended, its other fields (a signature comes last) are set.
    """
    last = items[-1] if items else None
    same = last is not None and all(last.get(name) == part.get(name) for name in ("type", "index"))
    if last is None or not same or "data" in part:  # encrypted data is never split
        items.append(dict(part))
        return
    for name, value in part.items():
        if name == "thinking" and isinstance(value, list) and isinstance(last.get(name), list):
            last[name] = [{"type": "text", "text": "".join(piece.get("text") or "" for piece in last[name] + value)}]
        elif name in ("text", "summary") and isinstance(last.get(name), str):
            last[name] += value or ""
        elif value is not None:
            last[name] = value


class OpenAIModel(HttpModel):
    path = "/chat/completions"
    reader = OpenAITurn

    @staticmethod
    def fields(request: ModelRequest) -> dict[str, Any]:
        model, dialect, parameters = request.model, request.model.dialect, request.model.parameters
        tools = [{"type": "function", "function": wire.function_of(tool)} for tool in request.tools]
        return {
            "model": model.provider_model,
            "messages": _messages(request),
            dialect.max_tokens_field: request.max_output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True} if dialect.stream_options else None,
            "prompt_cache_key": request.chat_id if dialect.prompt_cache_key else None,
            **wire.sampling(request, temperature="temperature", top_p="topP", stop="stop"),
            dialect.seed_field: parameters.get("seed"),
            "reasoning_effort": (tools and dialect.effort_with_tools) or parameters.get("reasoningEffort"),
            "tools": tools or None,
            "parallel_tool_calls": dialect.parallel_tool_calls if tools else None,
        }


def _messages(request: ModelRequest) -> list[dict[str, Any]]:
    """The messages of a request. A turn without text and calls is left out: some servers refuse it."""
    model, dialect = request.model, request.model.dialect
    found: list[dict[str, Any]] = []
    if request.instructions:
        found.append({"role": dialect.system_role, "content": request.instructions})
    images: list[dict[str, Any]] = []
    for message in request.messages:
        if isinstance(message, ToolMessage):
            # The format has no field for a failure, and allows no images here: they follow the last outcome.
            text = f"Error: {message.content}" if message.is_error else message.content
            text = "\n".join([text, *(wire.file_text(file) for file in message.files if not file.data)])
            call_id = wire.sent_id(message.tool_call_id, dialect.call_id_length)
            found.append({"role": "tool", "tool_call_id": call_id, "content": text})
            images += [part for file in message.files if file.data for part in _file_parts(file)]
            continue
        if images:
            found.append({"role": "user", "content": images})
            images = []
        if isinstance(message, UserMessage):
            parts = [part for file in message.files for part in _file_parts(file)]
            content = [*parts, *_text_parts(message.text)] if parts else message.text
            found.append({"role": "user", "content": content})
        elif message.text or message.tool_calls:
            found.append(_assistant_message(message, model.origin, dialect))
    return [*found, {"role": "user", "content": images}] if images else found


def _assistant_message(message: AssistantMessage, origin: str, dialect: Dialect) -> dict[str, Any]:
    values: dict[str, Any] = {"role": "assistant", "content": message.text}
    if message.tool_calls:
        values |= {"content": message.text or None, "tool_calls": [_call(call, dialect) for call in message.tool_calls]}
    if not dialect.reasoning_back:
        return values
    if message.tool_calls and dialect.reasoning_field == REASONING_TEXT:
        # DeepSeek and Kimi refuse a turn with calls but without this field, also if another model made the calls.
        values[REASONING_TEXT] = ""
    extra: dict[int, Any] = {0: NO_SIGNATURE}
    for item in message.reasoning if message.origin == origin else ():
        back = item["value"]
        if item["field"] == EXTRA_CONTENT:
            extra[item["call"]] = back
            continue
        if item["field"] == "content":
            back = [*back, *_text_parts(message.text)]
        values[item["field"]] = back
    if dialect.reasoning_field == EXTRA_CONTENT:
        for number, call in enumerate(values.get("tool_calls", ())):
            call |= {EXTRA_CONTENT: extra[number]} if number in extra else {}
    return values


def _text_parts(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}] if text else []


def _file_parts(file: AttachedFile) -> list[dict[str, Any]]:
    """The file's label and text, and the file itself if it is not text."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": wire.file_text(file)}]
    if file.data is not None and file.content_type.startswith("image/"):
        parts.append({"type": "image_url", "image_url": {"url": wire.data_url(file)}})
    elif file.data is not None:
        parts.append({"type": "file", "file": {"filename": file.name, "file_data": wire.data_url(file)}})
    return parts


def _call(call: ToolCall, dialect: Dialect) -> dict[str, Any]:
    # Many servers parse the arguments and refuse the whole transcript if they are malformed.
    function = {"name": wire.sent_name(call.name), "arguments": to_text(wire.arguments_object(call.arguments))}
    return {"id": wire.sent_id(call.id, dialect.call_id_length), "type": "function", "function": function}
