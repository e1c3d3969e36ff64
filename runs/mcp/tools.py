"""The tools of the MCP endpoint: each does the same as an endpoint of the public surface, and needs the same scope.

What a tool takes is declared by its serializer alone. This module does not use JSON-RPC. A refusal is a DomainError.
"""

import hashlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.core.validators import RegexValidator
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.schemas.openapi import AutoSchema

from chats.serializers import ChatInput, ChatSerializer
from chats.services import chats_of, make_chat
from config.api import idempotency, pagination, ratelimit
from config.api.serializers import (
    CamelSerializer,
    CreditsNumberField,
    NoInput,
    StrictCharField,
    StrictIntegerField,
    StrictNumberField,
)
from config.api.viewsets import find
from config.kernel import money
from config.kernel.errors import Forbidden
from config.kernel.jsontext import dumps
from config.telemetry.logs import request_id
from credits import ledger
from credits.serializers import AccountSerializer
from runs import services
from runs.calls import (
    ANSWERS,
    AnswerKind,
    CallResultInput,
    ToolInvocationSerializer,
    WaitpointSerializer,
    invocation_without_text,
)
from runs.mcp.wait import WAIT_MAX_SECONDS, Started
from runs.models import FINAL_RUN_STATUSES, Awaiting, Run, RunStatus
from runs.serializers import RUN_STATE, RunInput, RunSerializer
from runs.streams.views import opening_of
from runs.tools.schema import one_check_of

# Arguments that change the call and not what it creates: a repeated call may wait for a different time.
OF_THE_CALL = ("idempotency_key", "wait_seconds")
# What a key without the scope runs:read sees of a waitpoint.
WAITPOINT_STATE = {"id", "agentRunId", "kind", "status", "expiresAt", "resolvedAt"}


class PageInput(CamelSerializer):
    limit = StrictIntegerField(required=False, min_value=1, max_value=pagination.API_PAGE_SIZE_MAX)
    cursor = StrictCharField(required=False, help_text="The nextCursor of the page before.")


class KeyInput(CamelSerializer):
    idempotency_key = StrictCharField(
        required=False,
        trim_whitespace=False,
        min_length=1,
        max_length=255,
        validators=[RegexValidator("^[ -~]+$", "Use 1 to 255 printable ASCII characters.")],
        help_text="Any text of the caller's own: the same call with it within a day creates nothing more.",
    )


class NewChatInput(KeyInput, ChatInput):
    pass


class StartInput(KeyInput, RunInput):
    chat_id = StrictCharField()
    wait_seconds = StrictNumberField(required=False, default=0, min_value=0, max_value=WAIT_MAX_SECONDS)


class RunChoice(CamelSerializer):
    run_id = StrictCharField()


class WaitpointChoice(CamelSerializer):
    ignores_unknown = True
    waitpoint_id = StrictCharField()


class RespondInput(WaitpointChoice, AnswerKind):
    """With the fields of the answer, which are checked once the waitpoint is found."""

    def to_internal_value(self, data: Any) -> Any:
        answer = {name: value for name, value in data.items() if name != "waitpointId"}
        return WaitpointChoice.validated(data) | {"answer": answer}


class SubmitInput(CamelSerializer):
    """With the fields of the outcome, which are checked once the call is found."""

    ignores_unknown = True
    tool_invocation_id = StrictCharField()

    def to_internal_value(self, data: Any) -> Any:
        outcome = {name: value for name, value in data.items() if name != "toolInvocationId"}
        return super().to_internal_value(data) | {"answer": outcome}


class InputSchema(AutoSchema):
    """DRF's JSON Schema of a serializer, with the fields of our own."""

    def map_field(self, field: Any) -> dict[str, Any]:
        if own := getattr(field, "json_schema", None):
            return dict(own)
        if isinstance(field, CreditsNumberField):
            return {"type": "number"} | ({} if field.minimum is None else {"minimum": money.to_number(field.minimum)})
        schema: dict[str, Any] = super().map_field(field)
        if isinstance(field, serializers.BooleanField):
            schema["type"] = "boolean"
        if isinstance(field, serializers.ListField):
            self.map_field_validators(field.child, schema["items"])
        return schema


@dataclass(frozen=True)
class McpTool:
    """``call`` takes the request, whose ``auth`` is an API key, and the validated arguments; it returns the result, or
    Started.

    ``variants``: further serializers whose fields the tool takes, depending on the arguments.
    """

    title: str
    scope: str
    call: Callable[[Request, dict[str, Any]], Any]
    input: type[CamelSerializer]
    variants: tuple[type[CamelSerializer], ...]

    @property
    def starts_run(self) -> bool:
        return issubclass(self.input, StartInput)

    def listing(self) -> dict[str, Any]:
        """The tool's entry in the answer to ``tools/list``."""
        schema = InputSchema().map_serializer(self.input())
        for variant in self.variants:
            schema["properties"] = InputSchema().map_serializer(variant())["properties"] | schema["properties"]
        return {
            "name": self.call.__name__,
            "title": self.title,
            "description": " ".join((inspect.getdoc(self.call) or "").split()),
            "inputSchema": schema,
            "annotations": {"readOnlyHint": self.scope.endswith(":read"), "openWorldHint": self.starts_run},
        }


TOOLS: dict[str, McpTool] = {}


def tool(
    title: str, scope: str, input: type[CamelSerializer] = NoInput, variants: tuple[type[CamelSerializer], ...] = ()
) -> Any:
    """Declares a tool: its name is the function's, and its description the docstring."""

    def declare(call: Callable[[Request, dict[str, Any]], Any]) -> Any:
        TOOLS[call.__name__] = McpTool(title, scope, call, input, variants)
        return call

    return declare


def call_tool(tool: McpTool, request: Request, arguments: dict[str, Any]) -> Any:
    """Raises DomainError or DRF's ValidationError."""
    user: Any = request.user
    if not has_scope(request, tool.scope):
        raise Forbidden(f"This tool needs the scope {tool.scope}.", details={"requiredScope": tool.scope})
    if tool.starts_run:
        ratelimit.charge_caller(request._request, ratelimit.run_starts_of("public", user))
    with one_check_of(user.pk, arguments):
        given = tool.input.validated(arguments)
    return tool.call(request, given)


def has_scope(request: Request, scope: str) -> bool:
    key: Any = request.auth
    return scope in key.scopes


def made_once(request: Request, tool: str, given: dict[str, Any], make: Callable[[], str]) -> str:
    """The id of what ``make`` creates, or of what the same call created before with its ``idempotencyKey``."""
    key = given.get("idempotency_key")
    if key is None:
        return make()
    same = {name: value for name, value in sorted(given.items()) if name not in OF_THE_CALL}
    return idempotency.made_once(request.user, "mcp", key, hashlib.sha256(dumps([tool, same])).hexdigest(), make)


def only(names: set[str], shape: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in shape.items() if name in names}


def shown(request: Request, run: Run) -> dict[str, Any]:
    """The run; its state alone for a key that may not read runs."""
    shape = dict(RunSerializer(run).data)
    return shape if has_scope(request, "runs:read") else only(RUN_STATE, shape)


def run_of(request: Request, run_id: str) -> Run:
    return find(services.runs_of(request.user), run_id)


@tool("List chats", "chats:read", PageInput)
def list_chats(request: Request, given: dict[str, Any]) -> dict[str, Any]:
    """The user's chats, newest first, as a page of items and a nextCursor."""
    query = {name: str(value) for name, value in given.items()}
    return pagination.page(chats_of(request.user), query, ChatSerializer().to_representation)


@tool("Create a chat", "chats:write", NewChatInput)
def create_chat(request: Request, given: dict[str, Any]) -> dict[str, Any]:
    """Creates a chat, in which runs can be started. With the clientId of a chat, that chat is the result."""
    asked = {name: value for name, value in given.items() if name not in OF_THE_CALL}
    key = made_once(request, "create_chat", given, lambda: make_chat(request.user, **asked)[0].pk)
    chat = ChatSerializer(find(chats_of(request.user), key)).data
    # The chat of an earlier call can have been named after its first message since then.
    return chat if has_scope(request, "chats:read") else chat | {"title": given.get("title")}


@tool("Start a run", "runs:write", StartInput)
def start_run(request: Request, given: dict[str, Any]) -> Any:
    """Sends a message to the agent in a chat. Answers with the run: after waitSeconds at the latest, sooner if the run
    has ended, waits for an answer (status waiting, pendingWaitpoint) or awaits the caller's app (awaiting client, see
    submit_tool_result). The agent's text is in answer. Look at an
    unfinished run again with get_run.
    """
    body = {name: value for name, value in given.items() if name not in ("chat_id", *OF_THE_CALL)}
    services.require_allowed_to_keys(body)

    def make() -> str:
        return services.start_run(request.user, given["chat_id"], request_id=request_id.get() or "", **body).pk

    run = run_of(request, made_once(request, "start_run", given, make))
    # A repeated call finds the run as it is, and does not wait for what has happened before.
    needs_caller = run.status == RunStatus.WAITING or run.awaiting == Awaiting.CLIENT
    if not given["wait_seconds"] or run.status in FINAL_RUN_STATUSES or needs_caller:
        return shown(request, run)
    return Started(opening_of(request, run, run.last_stream_index), given["wait_seconds"])


@tool("Get a run", "runs:read", RunChoice)
def get_run(request: Request, given: dict[str, Any]) -> dict[str, Any]:
    """A run with its status, tool calls, credits and pending waitpoint, and the agent's text so far."""
    return shown(request, run_of(request, given["run_id"]))


@tool("Cancel a run", "runs:write", RunChoice)
def cancel_run(request: Request, given: dict[str, Any]) -> dict[str, Any]:
    """Ends a run. A finished one stays unchanged."""
    return shown(request, services.cancel_run(run_of(request, given["run_id"])))


@tool("Answer what a run waits for", "waitpoints:respond", RespondInput, tuple(ANSWERS.values()))
def respond_to_waitpoint(request: Request, given: dict[str, Any]) -> dict[str, Any]:
    """Approves or refuses credits (kind CREDIT_APPROVAL, approved), or answers a question (kind CLARIFICATION, answer;
    with a schema in its requestPayload: data that fits it, or declined). The first answer counts.
    """
    waitpoint = find(services.waitpoints_of(request.user), given["waitpoint_id"])
    resolved = dict(WaitpointSerializer(services.respond(waitpoint, given["answer"])).data)
    return resolved if has_scope(request, "runs:read") else only(WAITPOINT_STATE, resolved)


@tool("Submit the result of a client tool", "runs:write", SubmitInput, (CallResultInput,))
def submit_tool_result(request: Request, given: dict[str, Any]) -> dict[str, Any]:
    """Gives the outcome of a tool call that awaits the caller's app (awaiting client): its result, or why it failed
    (error). The first counts.
    """
    call = find(services.invocations_of(request.user), given["tool_invocation_id"])
    ended = dict(ToolInvocationSerializer(services.submit_result(call, given["answer"])).data)
    return ended if has_scope(request, "runs:read") else invocation_without_text(ended)


@tool("Get credits", "credits:read")
def get_credits(request: Request, given: dict[str, Any]) -> dict[str, Any]:
    """The user's balance, the credits held for tool calls in progress, and the available credits."""
    user: Any = request.user
    return dict(AccountSerializer(ledger.account_for(user.pk)).data)
