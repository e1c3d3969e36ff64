"""The answers of the model server in the real wire formats: the frames of a stream for each kind of provider."""

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs

GREETING = "Hello, wörld! 🦊 How can I help?"
INPUT_TOKENS, CACHED_TOKENS, OUTPUT_TOKENS = 21, 5, 13
ENCRYPTED = "gAAAAABencrypted=="
SIGNATURE = "EqQBsignature=="


class Wish:
    """The requested behaviour, parsed from the model's name."""

    def __init__(self, model: str) -> None:
        self.values = parse_qs(model, keep_blank_values=True)

    def text(self, name: str, default: str = "") -> str:
        return self.values.get(name, [default])[0]

    def number(self, name: str, default: int = 0) -> int:
        return int(self.text(name, str(default)))

    def calls(self) -> list[tuple[str, str]]:
        names, arguments = self.values.get("call", []), self.values.get("args", [])
        return [(name, arguments[at] if at < len(arguments) else "{}") for at, name in enumerate(names)]


class Answer:
    """What is answered, whatever the format: text in deltas, calls, and the counts to report."""

    def __init__(self, body: dict[str, Any], wish: Wish) -> None:
        self.body, self.wish = body, wish
        transcript = body.get("messages") or body.get("input") or []
        self.turn = len(transcript)
        results = _results(transcript)
        self.calls = [] if results else wish.calls()
        if count := wish.number("chunks"):
            self.deltas = [f"word{number} " for number in range(1, count + 1)]
        else:
            default = "" if self.calls else "; ".join(results) if results else GREETING
            text = wish.text("text", default)
            self.deltas = [text[at : at + 3] for at in range(0, len(text), 3)]
        self.reasons = wish.text("reason")
        zero = wish.text("usage") == "zero"
        self.counted = wish.text("usage") != "0"
        self.counts = (0, 0, 0) if zero else (INPUT_TOKENS, CACHED_TOKENS, OUTPUT_TOKENS)

    @property
    def text(self) -> str:
        return "".join(self.deltas)


def _results(transcript: list[dict[str, Any]]) -> list[str]:
    """The results of the calls after the last message of the user."""
    found: list[str] = []
    for message in transcript:
        parts = message["content"] if isinstance(message.get("content"), list) else []
        tool_results = [part for part in parts if part.get("type") == "tool_result"]
        if message.get("type") == "function_call_output":
            found.append(str(message["output"]))
        elif message.get("role") == "tool":
            found.append(message["content"])
        elif tool_results:
            found += [str(part.get("content", "")) for part in tool_results]
        elif message.get("role") == "user":
            found.clear()
    return found


def _halves(text: str) -> list[str]:
    return [text[: len(text) // 2], text[len(text) // 2 :]]


def frame(data: Any, event: str = "") -> bytes:
    head = f"event: {event}\n" if event else ""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return f"{head}data: {text}\n\n".encode()


# Each returns the frames, the last ones of them apart, an error event, and the answer as one document.
Frames = tuple[list[bytes], list[bytes], bytes, dict[str, Any]]


def openai(answer: Answer) -> Frames:
    wish = answer.wish
    base = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1_750_000_000, "model": "test"}

    def choice(delta: dict[str, Any], finish: str | None = None) -> bytes:
        return frame({**base, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]})

    frames = [choice({"role": "assistant", "content": "", "refusal": None})]
    frames += [choice({"reasoning_content": part}) for part in _halves(answer.reasons) if part]
    if wish.text("content") == "list":
        frames += [choice({"content": [{"type": "text", "text": text}]}) for text in answer.deltas]
    else:
        frames += [choice({"refusal" if wish.text("refusal") else "content": text}) for text in answer.deltas]
    calls = []
    for at, (name, arguments) in enumerate(answer.calls):
        call = {"id": f"call_{answer.turn}_{at}", "type": "function", "function": {"name": name, "arguments": ""}}
        frames.append(choice({"tool_calls": [{"index": at, **call}]}))
        frames += [choice({"tool_calls": [{"index": at, "function": {"arguments": p}}]}) for p in _halves(arguments)]
        calls.append({**call, "function": {"name": name, "arguments": arguments}})
    finish = wish.text("finish", "tool_calls" if calls else "stop")
    input_tokens, cached, output_tokens = answer.counts
    usage = {
        "prompt_tokens": input_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": input_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    end = [choice({}, finish)]
    if answer.counted and answer.body.get("stream_options", {}).get("include_usage"):
        end.append(frame({**base, "choices": [], "usage": usage}))
    end.append(frame("[DONE]"))
    error = frame({"error": {"message": "The server had an error.", "type": "server_error"}})
    message = {"role": "assistant", "content": answer.text, "tool_calls": calls}
    document = {**base, "choices": [{"index": 0, "message": message, "finish_reason": finish}]}
    return frames, end, error, document | ({"usage": usage} if answer.counted else {})


def anthropic(answer: Answer) -> Frames:
    wish = answer.wish

    def event(name: str, **fields: Any) -> bytes:
        return frame({"type": name, **fields}, name)

    input_tokens, cached, output_tokens = answer.counts
    message = {"id": "msg_1", "type": "message", "role": "assistant", "content": [], "model": "test"}
    read = {"input_tokens": input_tokens - cached, "cache_read_input_tokens": cached}
    if answer.counted:
        message["usage"] = read | {"output_tokens": min(1, output_tokens)}
    frames = [event("message_start", message=message), event("ping")]
    blocks: list[tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]] = []
    if answer.reasons:
        parts = [{"type": "thinking_delta", "thinking": part} for part in _halves(answer.reasons)]
        signature = {"type": "signature_delta", "signature": SIGNATURE}
        start = {"type": "thinking", "thinking": "", "signature": ""}
        blocks.append((start, [*parts, signature], {"thinking": answer.reasons, "signature": SIGNATURE}))
        blocks.append(({"type": "redacted_thinking", "data": ENCRYPTED}, [], {}))
    if answer.deltas:
        deltas = [{"type": "text_delta", "text": text} for text in answer.deltas]
        blocks.append(({"type": "text", "text": ""}, deltas, {"text": answer.text}))
    for at, (name, arguments) in enumerate(answer.calls):
        parts = [{"type": "input_json_delta", "partial_json": part} for part in ["", *_halves(arguments)]]
        call = {"type": "tool_use", "id": f"toolu_{answer.turn}_{at}", "name": name, "input": {}}
        blocks.append((call, parts, {"input": _object(arguments)}))
    for index, (block, parts, _) in enumerate(blocks):
        frames.append(event("content_block_start", index=index, content_block=block))
        frames += [event("content_block_delta", index=index, delta=part) for part in parts]
        frames.append(event("content_block_stop", index=index))
    reason = wish.text("finish", "tool_use" if answer.calls else "end_turn")
    usage = {"usage": {"output_tokens": output_tokens}} if answer.counted else {}
    end = [event("message_delta", delta={"stop_reason": reason, "stop_sequence": None}, **usage), event("message_stop")]
    error = event("error", error={"type": "overloaded_error", "message": "Overloaded"})
    content = [block | whole for block, _, whole in blocks]
    document = {**message, "content": content, "stop_reason": reason}
    return frames, end, error, document | ({"usage": read | usage["usage"]} if answer.counted else {})


def _object(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return {}


def openai_responses(answer: Answer) -> Frames:
    """As https://api.openai.com/v1/responses sends them: each event has its number and its item's id and index."""
    wish, frames = answer.wish, []
    items: list[dict[str, Any]] = []

    def event(name: str, **fields: Any) -> bytes:
        frames.append(frame({"type": name, "sequence_number": len(frames), **fields}, name))
        return frames[-1]

    def item(kind: str, **fields: Any) -> dict[str, Any]:
        items.append({"id": f"{kind[:3]}_{answer.turn}_{len(items)}", "type": kind, **fields})
        return items[-1]

    response = {"id": "resp_1", "object": "response", "created_at": 1_750_000_000, "model": "test", "error": None}
    response |= {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    event("response.created", response=response)
    event("response.in_progress", response=response)
    if answer.reasons:
        summary = [{"type": "summary_text", "text": answer.reasons}]
        asked = "reasoning.encrypted_content" in answer.body.get("include", ())
        whole = item("reasoning", summary=summary, status="completed", encrypted_content=ENCRYPTED if asked else None)
        _item_frames(event, items, whole | {"summary": [], "encrypted_content": "gAAA" if asked else None}, [])
    if answer.deltas:
        refusal = bool(wish.text("refusal"))
        part = {"type": "refusal", "refusal": answer.text} if refusal else {"type": "output_text", "text": answer.text}
        content = [part | ({} if refusal else {"annotations": [], "logprobs": []})]
        phase = {"phase": "commentary"} if wish.text("phase") else {}
        whole = item("message", role="assistant", content=content, status="completed", **phase)
        name = "response.refusal.delta" if refusal else "response.output_text.delta"
        _item_frames(event, items, whole | {"content": []}, [(name, {"content_index": 0}, answer.deltas)])
    for at, (name, arguments) in enumerate(answer.calls):
        call = {"name": name, "call_id": f"call_{answer.turn}_{at}", "arguments": arguments, "status": "completed"}
        whole = item("function_call", **call)
        deltas = ("response.function_call_arguments.delta", {}, _halves(arguments))
        _item_frames(event, items, whole | {"arguments": ""}, [deltas])
    input_tokens, cached, output_tokens = answer.counts
    usage = {
        "input_tokens": input_tokens,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": input_tokens + output_tokens,
    }
    finish = wish.text("finish")
    status = "incomplete" if finish else "completed"
    details = {"reason": finish} if finish else None
    document = response | {"status": status, "incomplete_details": details, "output": items}
    document["usage"] = usage if answer.counted else None
    event(f"response.{status}", response=document)
    end = [frames.pop()]
    message = "The server had an error processing your request."
    failed = response | {"status": "failed", "error": {"code": "server_error", "message": message}}
    error = frame({"type": "response.failed", "sequence_number": 99, "response": failed}, "response.failed")
    return frames, end, error, document


def _item_frames(
    event: Callable[..., bytes], items: list[dict[str, Any]], start: dict[str, Any], deltas: list[Any]
) -> None:
    index = len(items) - 1
    event("response.output_item.added", output_index=index, item=start | {"status": "in_progress"})
    for name, fields, parts in deltas:
        for part in parts:
            event(name, item_id=start["id"], output_index=index, delta=part, **fields)
    event("response.output_item.done", output_index=index, item=items[-1])


FORMATS: dict[str, Callable[[Answer], Frames]] = {
    "/chat/completions": openai,
    "/responses": openai_responses,
    "/messages": anthropic,
}
