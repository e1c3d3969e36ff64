"""The tools of the MCP endpoint: each does the same as an endpoint of the public surface, and needs the same scope.

What a tool takes is declared by its serializer alone. This module does not use JSON-RPC. A refusal is a DomainError.
"""

import hashlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.core.validators import RegexValidator
from django.http import HttpRequest
from rest_framework import serializers
from rest_framework.schemas.openapi import AutoSchema

from apikeys.models import ApiKey
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
from config.kernel import money
from config.kernel.errors import Forbidden, NotFound
from config.kernel.ids import is_plausible_id
from config.kernel.jsontext import dumps
from config.telemetry.logs import request_id
from credits import ledger
from credits.serializers import AccountSerializer
from runs import services
from runs.invocations import CallResultInput, ToolInvocationSerializer, invocation_without_text
from runs.mcp.wait import WAIT_MAX_SECONDS, Started
from runs.models import FINAL_RUN_STATUSES, Run
from runs.serializers import RUN_STATE, RunInput, RunSerializer
from runs.streams.hub import Opening
from runs.tools.schema import one_check_of
from runs.waitpoints import ANSWERS, AnswerKind, WaitpointSerializer

# Arguments that change the call and not what it creates: a repeated call may wait for a different time.
OF_THE_CALL = ("idempotency_key", "wait_seconds")
# What a key without the scope runs:read sees of a waitpoint.
WAITPOINT_STATE = {"id", "agentRunId", "kind", "status", "expiresAt", "resolvedAt"}


@dataclass(frozen=True)
class Caller:
    """The user, the API key and the request of a call."""

    user: Any
    key: ApiKey
    request: HttpRequest

    @property
    def reads_runs(self) -> bool:
        return "runs:read" in self.key.scopes


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
    """``call`` takes the validated arguments and returns the result, or Started.

    ``variants``: further serializers whose fields the tool takes, depending on the arguments.
    """

    title: str
    scope: str
    call: Callable[[Caller, dict[str, Any]], Any]
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

    def declare(call: Callable[[Caller, dict[str, Any]], Any]) -> Any:
        TOOLS[call.__name__] = McpTool(title, scope, call, input, variants)
        return call

    return declare


def call_tool(tool: McpTool, caller: Caller, arguments: dict[str, Any]) -> Any:
    """Raises DomainError or DRF's ValidationError."""
    if tool.scope not in caller.key.scopes:
        raise Forbidden(f"This tool needs the scope {tool.scope}.", details={"requiredScope": tool.scope})
    if tool.starts_run:
        ratelimit.charge_caller(caller.request, ratelimit.run_starts_of("public", caller.user))
    with one_check_of(caller.user.pk, arguments):
        given = tool.input.validated(arguments)
    return tool.call(caller, given)


def find(rows: Any, key: str) -> Any:
    found = rows.filter(pk=key).first() if is_plausible_id(key) else None
    if found is None:
        raise NotFound
    return found


def made_once(caller: Caller, tool: str, given: dict[str, Any], make: Callable[[], str]) -> str:
    """The id of what ``make`` creates, or of what the same call created before with its ``idempotencyKey``."""
    key = given.get("idempotency_key")
    if key is None:
        return make()
    same = {name: value for name, value in sorted(given.items()) if name not in OF_THE_CALL}
    return idempotency.made_once(caller.user, "mcp", key, hashlib.sha256(dumps([tool, same])).hexdigest(), make)


def only(names: set[str], shape: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in shape.items() if name in names}


def shown(caller: Caller, run: Run) -> dict[str, Any]:
    """The run; its state alone for a key that may not read runs."""
    shape = dict(RunSerializer(run).data)
    return shape if caller.reads_runs else only(RUN_STATE, shape)


def run_of(caller: Caller, run_id: str) -> Run:
    return find(services.runs_of(caller.user), run_id)


@tool("List chats", "chats:read", PageInput)
def list_chats(caller: Caller, given: dict[str, Any]) -> dict[str, Any]:
    """The user's chats, newest first, as a page of items and a nextCursor."""
    query = {name: str(value) for name, value in given.items()}
    return pagination.page(chats_of(caller.user), query, ChatSerializer().to_representation)


@tool("Create a chat", "chats:write", NewChatInput)
def create_chat(caller: Caller, given: dict[str, Any]) -> dict[str, Any]:
    """Creates a chat, in which runs can be started. With the clientId of a chat, that chat is the result."""
    asked = {name: value for name, value in given.items() if name not in OF_THE_CALL}
    key = made_once(caller, "create_chat", given, lambda: make_chat(caller.user, **asked)[0].pk)
    chat = ChatSerializer(find(chats_of(caller.user), key)).data
    # The chat of an earlier call can have been named after its first message since then.
    return chat if "chats:read" in caller.key.scopes else chat | {"title": given.get("title")}


@tool("Start a run", "runs:write", StartInput)
def start_run(caller: Caller, given: dict[str, Any]) -> Any:
    """Sends a message to the agent in a chat. Answers with the run: after waitSeconds at the latest, sooner if the run
    has ended, waits for an answer (status waiting, pendingWaitpoint) or awaits the caller's app (awaiting client, see
    submit_tool_result). The agent's text is in answer. Look at an
    unfinished run again with get_run.
    """
    body = {name: value for name, value in given.items() if name not in ("chat_id", *OF_THE_CALL)}
    services.require_allowed_to_keys(body)

    def make() -> str:
        return services.start_run(caller.user, given["chat_id"], request_id=request_id.get() or "", **body).pk

    run = run_of(caller, made_once(caller, "start_run", given, make))
    if not given["wait_seconds"] or run.status in FINAL_RUN_STATUSES:
        return shown(caller, run)
    opening = Opening(run.pk, 0, run.last_stream_index, False, caller.user.pk, caller.key.pk)
    return Started(opening, given["wait_seconds"])


@tool("Get a run", "runs:read", RunChoice)
def get_run(caller: Caller, given: dict[str, Any]) -> dict[str, Any]:
    """A run with its status, tool calls, credits and pending waitpoint, and the agent's text so far."""
    return shown(caller, run_of(caller, given["run_id"]))


@tool("Cancel a run", "runs:write", RunChoice)
def cancel_run(caller: Caller, given: dict[str, Any]) -> dict[str, Any]:
    """Ends a run. A finished one stays unchanged."""
    return shown(caller, services.cancel_run(run_of(caller, given["run_id"])))


@tool("Answer what a run waits for", "waitpoints:respond", RespondInput, tuple(ANSWERS.values()))
def respond_to_waitpoint(caller: Caller, given: dict[str, Any]) -> dict[str, Any]:
    """Approves or refuses credits (kind CREDIT_APPROVAL, approved), or answers a question (kind CLARIFICATION, answer;
    with a schema in its requestPayload: data that fits it, or declined). The first answer counts.
    """
    waitpoint = find(services.waitpoints_of(caller.user), given["waitpoint_id"])
    resolved = dict(WaitpointSerializer(services.respond(waitpoint, given["answer"])).data)
    return resolved if caller.reads_runs else only(WAITPOINT_STATE, resolved)


@tool("Submit the result of a client tool", "runs:write", SubmitInput, (CallResultInput,))
def submit_tool_result(caller: Caller, given: dict[str, Any]) -> dict[str, Any]:
    """Gives the outcome of a tool call that awaits the caller's app (awaiting client): its result, or why it failed
    (error). The first counts.
    """
    call = find(services.invocations_of(caller.user), given["tool_invocation_id"])
    ended = dict(ToolInvocationSerializer(services.submit_result(call, given["answer"])).data)
    return ended if caller.reads_runs else invocation_without_text(ended)


@tool("Get credits", "credits:read")
def get_credits(caller: Caller, given: dict[str, Any]) -> dict[str, Any]:
    """The user's balance, the credits held for tool calls in progress, and the available credits."""
    return dict(AccountSerializer(ledger.account_for(caller.user.pk)).data)
