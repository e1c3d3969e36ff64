"""What an AG-UI client sends. Of its history, the user's last message and the results of calls after it count."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chats.services import CLIENT_ID
from config.kernel.errors import ValidationFailed
from config.kernel.jsontext import require_text
from runs.fronts.starts import ERROR_MAX_CHARS, text_of
from runs.models import CLIENT_MESSAGE_ID_MAX_CHARS, WaitpointKind

RUN_ID_MAX_CHARS = 1000
RESUME_STATUSES = ("resolved", "cancelled")
NO_INPUT = {"type": "object", "properties": {}}

Object = dict[str, Any]


@dataclass(frozen=True)
class Sent:
    """A ``RunAgentInput``. ``thread`` and ``name``: the client's ids of the chat and of the AG-UI run. ``message``: the
    user's last message, empty if there is none. ``trailing``: the messages of the agent and tools after it.
    """

    thread: str
    name: str
    message: Object
    trailing: Sequence[Object]
    resume: Sequence[Object]
    tools: Sequence[Object]
    context: Sequence[Object]
    run: Any

    @property
    def text(self) -> str:
        return text_of(self.message.get("content"))

    @property
    def message_id(self) -> str:
        """The client's id of the message; empty if it is too long to be stored."""
        given = self.message.get("id")
        return given if isinstance(given, str) and len(given) <= CLIENT_MESSAGE_ID_MAX_CHARS else ""

    def results(self) -> dict[str, Object]:
        """The results of calls by the calls' ids, as REST takes them."""
        found: dict[str, Object] = {}
        for message in self.trailing:
            call_id, error = message.get("toolCallId"), message.get("error")
            if message.get("role") == "tool" and isinstance(call_id, str):
                failed = error[:ERROR_MAX_CHARS] if isinstance(error, str) else ""
                found[call_id] = {"error": failed} if failed else {"result": text_of(message.get("content"))}
        return found

    def said(self, agent: str | None) -> Object:
        """The options of the run that the protocol has fields of its own for. Raises ValidationFailed."""
        said: Object = {"agent": agent} if agent else {}
        if self.tools:
            said["clientTools"] = [_client_tool(tool) for tool in self.tools]
        given = self.run.get("instructions") if isinstance(self.run, dict) else None
        lines = [f"{_line(entry, 'description')}: {_line(entry, 'value')}" for entry in self.context]
        if lines and (given is None or isinstance(given, str)):
            said["instructions"] = "\n".join([*([given] if given else []), *lines])
        return said


def read(body: Mapping[str, Any]) -> Sent:
    """Raises ValidationFailed, MalformedJSON."""
    problems: dict[str, list[str]] = {}
    thread, name = body.get("threadId"), body.get("runId")
    if not isinstance(thread, str) or not CLIENT_ID.fullmatch(thread):
        problems["threadId"] = ["Use 1 to 128 printable ASCII characters."]
    if not isinstance(name, str) or not 0 < len(name) <= RUN_ID_MAX_CHARS:
        problems["runId"] = [f"Use a text of 1 to {RUN_ID_MAX_CHARS} characters."]
    fields = ("messages", "resume", "tools", "context")
    messages, resume, tools, context = (_objects(body.get(field), field, problems) for field in fields)
    wrong = (index for index, entry in enumerate(resume) if entry.get("status") not in RESUME_STATUSES)
    if (index := next(wrong, None)) is not None:
        problems[f"resume.{index}.status"] = [f"Use one of these: {', '.join(RESUME_STATUSES)}."]
    if problems:
        raise ValidationFailed(problems)
    properties = body.get("forwardedProps")
    run = properties.get("run") if isinstance(properties, dict) else None
    last = max((index for index, message in enumerate(messages) if message.get("role") == "user"), default=-1)
    message = messages[last] if last >= 0 else {}
    trailing = [said for said in messages[last + 1 :] if said.get("role") in ("assistant", "tool")]
    sent = Sent(str(thread), str(name), message, trailing, resume, tools, context, {} if run is None else run)
    require_text(vars(sent))
    return sent


def _objects(given: Any, field: str, problems: dict[str, list[str]]) -> list[Object]:
    if given is None:
        return []
    if not isinstance(given, list) or not all(isinstance(item, dict) for item in given):
        problems[field] = ["Use a list of objects."]
        return []
    return given


def _line(entry: Object, name: str) -> str:
    value = entry.get(name)
    if not isinstance(value, str):
        raise ValidationFailed({f"context.{name}": ["A text is required."]})
    return value


def _client_tool(tool: Object) -> Object:
    schema = tool.get("parameters")
    described = {"name": tool.get("name"), "description": tool.get("description")}
    return described | {"inputSchema": NO_INPUT if schema is None else schema}


def answer_of(entry: Object, kind: str) -> Object | None:
    """The fields with which REST answers a waitpoint of this kind; None if the run is to be cancelled instead."""
    approves = kind == WaitpointKind.CREDIT_APPROVAL
    payload = entry.get("payload")
    if entry.get("status") == "cancelled":
        if not approves:
            return None
        payload = False
    return payload if isinstance(payload, dict) else {"approved" if approves else "answer": payload}
