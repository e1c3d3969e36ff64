"""The tools of the MCP endpoint: each does the same as an endpoint of the public surface, and needs the same scope.

This module does not use JSON-RPC. A refusal is a DomainError.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

from django.http import HttpRequest
from rest_framework import serializers

from apikeys.models import ApiKey
from chats.serializers import ChatInput, ChatSerializer
from chats.services import chats_of, create_chat
from config.api import idempotency, pagination, ratelimit
from config.api.pagination import KeysetPagination
from config.api.serializers import CamelSerializer, NoInput, StrictCharField, StrictIntegerField
from config.kernel.errors import Forbidden, NotFound
from config.kernel.ids import is_plausible_id
from config.kernel.jsontext import dumps
from config.telemetry.logs import request_id
from credits import ledger
from credits.serializers import AccountSerializer
from runs import services
from runs.mcp.schema import input_schema
from runs.models import FINAL_RUN_STATUSES, Run
from runs.serializers import ANSWERS, RUN_STATE, AnswerKind, RunInput, RunSerializer, WaitpointSerializer
from runs.streams.hub import Opening
from runs.tools.schema import one_check_of

WAIT_MAX_SECONDS = 60
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


@dataclass(frozen=True)
class Started:
    """A run that the call waits for before its answer."""

    opening: Opening
    wait_seconds: float


class StrictNumberField(serializers.FloatField):
    """A JSON number: no text, no boolean."""

    def to_internal_value(self, data: Any) -> float:
        if isinstance(data, bool) or not isinstance(data, (int, float, Decimal)):
            self.fail("invalid")
        return super().to_internal_value(float(data))


def check_key(value: str) -> None:
    if not idempotency.KEY.fullmatch(value):
        raise serializers.ValidationError("Use 1 to 255 printable ASCII characters.")


class PageInput(CamelSerializer):
    limit = StrictIntegerField(required=False, min_value=1, max_value=pagination.API_PAGE_SIZE_MAX)
    cursor = StrictCharField(required=False, help_text="The nextCursor of the page before.")


class KeyInput(CamelSerializer):
    idempotency_key = StrictCharField(
        required=False,
        trim_whitespace=False,
        min_length=1,
        max_length=255,
        validators=[check_key],
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


@dataclass(frozen=True)
class McpTool:
    """``call`` takes the validated arguments and returns the result, or Started.

    ``variants``: further serializers whose fields the tool takes, depending on the arguments.
    """

    name: str
    title: str
    description: str
    scope: str
    call: Callable[[Caller, dict[str, Any]], Any]
    input: type[CamelSerializer] = NoInput
    variants: tuple[type[CamelSerializer], ...] = ()
    starts_run: bool = False

    def listing(self) -> dict[str, Any]:
        """The tool's entry in the answer to ``tools/list``."""
        return {
            "name": self.name,
            "title": self.title,
            "description": self.description,
            "inputSchema": input_schema(self.input, self.variants),
            "annotations": {"readOnlyHint": self.scope.endswith(":read"), "openWorldHint": self.starts_run},
        }


def call_tool(tool: McpTool, caller: Caller, arguments: dict[str, Any]) -> Any:
    """Raises DomainError or DRF's ValidationError."""
    if tool.scope not in caller.key.scopes:
        raise Forbidden(f"This tool needs the scope {tool.scope}.", details={"requiredScope": tool.scope})
    if tool.starts_run:
        ratelimit.charge_run_start(caller.request, "public", caller.user)
    with one_check_of(caller.user.pk):
        given = tool.input.validated(arguments)
    return tool.call(caller, given)


def find(rows: Any, key: str) -> Any:
    found = rows.filter(pk=key).first() if is_plausible_id(key) else None
    if found is None:
        raise NotFound
    return found


def list_chats(caller: Caller, given: dict[str, Any]) -> dict[str, Any]:
    query: Any = SimpleNamespace(query_params={name: str(value) for name, value in given.items()})
    return KeysetPagination().answer(chats_of(caller.user), query, ChatSerializer().to_representation)


def made_once(caller: Caller, tool: str, given: dict[str, Any], make: Callable[[], str]) -> str:
    """The id of what ``make`` creates, or of what the same call created before with its ``idempotencyKey``."""
    key = given.get("idempotency_key")
    if key is None:
        return make()
    same = {name: value for name, value in sorted(given.items()) if name not in OF_THE_CALL}
    return idempotency.made_once(caller.user, "mcp", key, hashlib.sha256(dumps([tool, same])).hexdigest(), make)


def make_chat(caller: Caller, given: dict[str, Any]) -> dict[str, Any]:
    key = made_once(caller, "create_chat", given, lambda: create_chat(caller.user, given.get("title")).pk)
    chat = ChatSerializer(find(chats_of(caller.user), key)).data
    # The chat of an earlier call can have been named after its first message since then.
    return chat if "chats:read" in caller.key.scopes else chat | {"title": given.get("title")}


def start_run(caller: Caller, given: dict[str, Any]) -> Started:
    body = {name: value for name, value in given.items() if name not in ("chat_id", *OF_THE_CALL)}
    services.require_allowed_to_keys(body)

    def make() -> str:
        return services.start_run(caller.user, given["chat_id"], request_id=request_id.get() or "", **body).pk

    run = find(services.runs_of(caller.user), made_once(caller, "start_run", given, make))
    over = run.status in FINAL_RUN_STATUSES
    opening = Opening(run.pk, 0, run.last_stream_index, over, caller.user.pk, caller.key.pk)
    return Started(opening, given["wait_seconds"])


def get_run(caller: Caller, given: dict[str, Any]) -> dict[str, Any]:
    return shown(caller, find(services.runs_of(caller.user), given["run_id"]))


def cancel_run(caller: Caller, given: dict[str, Any]) -> dict[str, Any]:
    return shown(caller, services.cancel_run(find(services.runs_of(caller.user), given["run_id"])))


def respond(caller: Caller, given: dict[str, Any]) -> dict[str, Any]:
    waitpoint = find(services.waitpoints_of(caller.user), given["waitpoint_id"])
    resolved = WaitpointSerializer(services.respond(waitpoint, given["answer"])).data
    return dict(resolved) if reads_runs(caller.key) else only(WAITPOINT_STATE, resolved)


def get_credits(caller: Caller, given: dict[str, Any]) -> dict[str, Any]:
    return dict(AccountSerializer(ledger.account_for(caller.user.pk)).data)


def after_waiting(caller: Caller, run_id: str) -> dict[str, Any]:
    """The run in its current state. Raises NotFound if its chat was deleted meanwhile."""
    return shown(caller, find(services.runs_of(caller.user), run_id))


def reads_runs(key: ApiKey) -> bool:
    return "runs:read" in key.scopes


def only(names: set[str], shape: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in shape.items() if name in names}


def shown(caller: Caller, run: Run) -> dict[str, Any]:
    """The run; its state alone for a key that may not read runs."""
    if not reads_runs(caller.key):
        return only(RUN_STATE, RunSerializer(run).data)
    return dict(RunSerializer(run).data)


TOOLS = {
    tool.name: tool
    for tool in (
        McpTool(
            "list_chats",
            "List chats",
            "The user's chats, newest first, as a page of items and a nextCursor.",
            "chats:read",
            list_chats,
            PageInput,
        ),
        McpTool(
            "create_chat",
            "Create a chat",
            "Creates a chat, in which runs can be started.",
            "chats:write",
            make_chat,
            NewChatInput,
        ),
        McpTool(
            "start_run",
            "Start a run",
            "Sends a message to the agent in a chat. Answers with the run: after waitSeconds at the latest, sooner "
            "if the run has ended or waits for an answer (status waiting, pendingWaitpoint). The agent's text is "
            "in answer. Look at an unfinished run again with get_run.",
            "runs:write",
            start_run,
            StartInput,
            starts_run=True,
        ),
        McpTool(
            "get_run",
            "Get a run",
            "A run with its status, tool calls, credits and pending waitpoint, and the agent's text so far.",
            "runs:read",
            get_run,
            RunChoice,
        ),
        McpTool(
            "cancel_run",
            "Cancel a run",
            "Ends a run. A finished one stays unchanged.",
            "runs:write",
            cancel_run,
            RunChoice,
        ),
        McpTool(
            "respond_to_waitpoint",
            "Answer what a run waits for",
            "Approves or refuses credits (kind CREDIT_APPROVAL, approved), or answers a question (kind CLARIFICATION, "
            "answer). The first answer counts.",
            "waitpoints:respond",
            respond,
            RespondInput,
            tuple(ANSWERS.values()),
        ),
        McpTool(
            "get_credits",
            "Get credits",
            "The user's balance, the credits held for tool calls in progress, and the available credits.",
            "credits:read",
            get_credits,
        ),
    )
}
