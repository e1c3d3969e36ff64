"""The tools of the MCP endpoint: each does what its endpoint of the public surface does, for the same scope.

Nothing here knows of JSON-RPC; a refusal is a DomainError, as everywhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

from django.conf import settings
from django.http import HttpRequest
from rest_framework import serializers

from apikeys.models import ApiKey
from chats.models import Message
from chats.serializers import ChatInput, ChatSerializer
from chats.services import chats_of, create_chat
from config.api import idempotency, ratelimit
from config.api.pagination import KeysetPagination
from config.api.serializers import CamelSerializer, StrictCharField, StrictIntegerField
from config.kernel.errors import Forbidden, NotFound
from config.kernel.ids import is_plausible_id
from config.kernel.jsontext import dumps
from config.telemetry.logs import request_id
from credits import ledger
from credits.serializers import AccountSerializer
from runs import services
from runs.models import FINAL_RUN_STATUSES, Run
from runs.serializers import ANSWERS, AnswerKind, RunInput, RunSerializer, WaitpointSerializer
from runs.streams.hub import Opening

WAIT_MAX_SECONDS = 60


@dataclass(frozen=True)
class Caller:
    """Who calls, with which key, in which request."""

    user: Any
    key: ApiKey
    request: HttpRequest


@dataclass(frozen=True)
class Started:
    """A run that is to be waited for before the call is answered."""

    run: Run
    opening: Opening
    wait_seconds: float


@dataclass(frozen=True)
class McpTool:
    """``call`` answers with the result, or with Started."""

    name: str
    title: str
    description: str
    scope: str
    call: Callable[[Caller, dict[str, Any]], Any]
    properties: Mapping[str, Any] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    reads: bool = False

    def listed(self) -> dict[str, Any]:
        """As ``tools/list`` shows it."""
        schema: dict[str, Any] = {"type": "object", "properties": dict(self.properties)}
        if self.required:
            schema["required"] = list(self.required)
        return {
            "name": self.name,
            "title": self.title,
            "description": self.description,
            "inputSchema": schema,
            "annotations": {"readOnlyHint": self.reads, "openWorldHint": self.name == "start_run"},
        }


def call_tool(tool: McpTool, caller: Caller, arguments: dict[str, Any]) -> Any:
    """Raises DomainError or DRF's ValidationError."""
    if tool.scope not in caller.key.scopes:
        raise Forbidden(f"This tool needs the scope {tool.scope}.", details={"requiredScope": tool.scope})
    return tool.call(caller, arguments)


# --- input -----------------------------------------------------------------------------------------------------------
def read(serializer_class: type[serializers.Serializer], arguments: dict[str, Any]) -> dict[str, Any]:
    serializer = serializer_class(data=arguments)
    serializer.is_valid(raise_exception=True)
    found: dict[str, Any] = serializer.validated_data
    return found


class StrictNumberField(serializers.FloatField):
    """A JSON number: no text, no boolean."""

    def to_internal_value(self, data: Any) -> float:
        if isinstance(data, bool) or not isinstance(data, (int, float, Decimal)):
            self.fail("invalid")
        return super().to_internal_value(float(data))


class PageInput(CamelSerializer):
    limit = StrictIntegerField(required=False, min_value=1, max_value=settings.API_PAGE_SIZE_MAX)
    cursor = StrictCharField(required=False)


class ChatChoice(CamelSerializer):
    chat_id = StrictCharField()


class RunChoice(CamelSerializer):
    run_id = StrictCharField()


class WaitpointChoice(CamelSerializer):
    waitpoint_id = StrictCharField()


def check_key(value: str) -> None:
    if not idempotency.KEY.fullmatch(value):
        raise serializers.ValidationError("Use 1 to 255 printable ASCII characters.")


class KeyInput(CamelSerializer):
    idempotency_key = StrictCharField(required=False, trim_whitespace=False, validators=[check_key])


class WaitInput(CamelSerializer):
    wait_seconds = StrictNumberField(required=False, default=0, min_value=0, max_value=WAIT_MAX_SECONDS)


def find(rows: Any, key: str) -> Any:
    found = rows.filter(pk=key).first() if is_plausible_id(key) else None
    if found is None:
        raise NotFound
    return found


# --- the tools -------------------------------------------------------------------------------------------------------
def list_chats(caller: Caller, arguments: dict[str, Any]) -> dict[str, Any]:
    wanted = read(PageInput, arguments)
    pages = KeysetPagination()
    query: Any = SimpleNamespace(query_params={name: str(value) for name, value in wanted.items()})
    chats = pages.paginate_queryset(chats_of(caller.user), query)
    return {"items": ChatSerializer(chats, many=True).data, "nextCursor": pages.next_cursor}


def made_once(caller: Caller, tool: str, arguments: dict[str, Any], make: Callable[[], str]) -> str:
    """The id of what ``make`` makes, or of what the same call has made before under its ``idempotencyKey``."""
    key = read(KeyInput, arguments).get("idempotency_key")
    if key is None:
        return make()
    # How long the caller waits is no part of what is made.
    said = {name: value for name, value in sorted(arguments.items()) if name not in ("idempotencyKey", "waitSeconds")}
    return idempotency.made_once(caller.user, "mcp", key, hashlib.sha256(dumps([tool, said])).hexdigest(), make)


def make_chat(caller: Caller, arguments: dict[str, Any]) -> dict[str, Any]:
    title = read(ChatInput, arguments).get("title")
    key = made_once(caller, "create_chat", arguments, lambda: create_chat(caller.user, title).pk)
    return dict(ChatSerializer(find(chats_of(caller.user), key)).data)


def start_run(caller: Caller, arguments: dict[str, Any]) -> Started:
    ratelimit.charge_run_start(caller.request, "public", caller.user)
    chat_id = read(ChatChoice, arguments)["chat_id"]
    wait_seconds = read(WaitInput, arguments)["wait_seconds"]
    body = read(RunInput, arguments)

    def make() -> str:
        return services.start_run(caller.user, chat_id, request_id=request_id.get() or "", **body).pk

    run = find(services.runs_of(caller.user), made_once(caller, "start_run", arguments, make))
    opening = Opening(
        run_id=run.pk,
        after=0,
        last=run.last_stream_index,
        over=run.status in FINAL_RUN_STATUSES,
        user_id=caller.user.pk,
        key_id=caller.key.pk,
    )
    return Started(run, opening, wait_seconds)


def get_run(caller: Caller, arguments: dict[str, Any]) -> dict[str, Any]:
    return shown(find(services.runs_of(caller.user), read(RunChoice, arguments)["run_id"]))


def cancel_run(caller: Caller, arguments: dict[str, Any]) -> dict[str, Any]:
    run = find(services.runs_of(caller.user), read(RunChoice, arguments)["run_id"])
    return shown(services.cancel_run(run))


def respond(caller: Caller, arguments: dict[str, Any]) -> dict[str, Any]:
    key = read(WaitpointChoice, arguments)["waitpoint_id"]
    waitpoint = find(services.waitpoints_of(caller.user), key)
    answer = read(ANSWERS[read(AnswerKind, arguments)["kind"]], arguments)
    return dict(WaitpointSerializer(services.respond(waitpoint, answer)).data)


def get_credits(caller: Caller, arguments: dict[str, Any]) -> dict[str, Any]:
    return dict(AccountSerializer(ledger.account_for(caller.user.pk)).data)


def after_waiting(caller: Caller, run_id: str) -> dict[str, Any]:
    """The run as it now stands. Raises NotFound if its chat was deleted meanwhile."""
    return shown(find(services.runs_of(caller.user), run_id))


def shown(run: Run) -> dict[str, Any]:
    """The run, and what the agent has said by now: a model that calls this has no stream to read it from."""
    answer = Message.objects.filter(pk=run.assistant_message_id).values_list("content", flat=True).first()
    return {**RunSerializer(run).data, "answer": answer}


TEXT = {"type": "string"}
RUN_ID = {"runId": TEXT}
IDEMPOTENCY_KEY = {
    "idempotencyKey": {
        "type": "string",
        "minLength": 1,
        "maxLength": 255,
        "description": "Any text of the caller's own: the same call with it again within a day makes nothing more.",
    }
}
TOOLS = {
    tool.name: tool
    for tool in (
        McpTool(
            "list_chats",
            "List chats",
            "The user's chats, newest first, as a page of items and a nextCursor.",
            "chats:read",
            list_chats,
            {
                "limit": {"type": "integer", "minimum": 1, "maximum": settings.API_PAGE_SIZE_MAX},
                "cursor": {"type": "string", "description": "The nextCursor of the page before."},
            },
            reads=True,
        ),
        McpTool(
            "create_chat",
            "Create a chat",
            "Makes a chat, in which runs can be started.",
            "chats:write",
            make_chat,
            {"title": {"type": "string", "minLength": 1, "maxLength": 200}, **IDEMPOTENCY_KEY},
        ),
        McpTool(
            "start_run",
            "Start a run",
            "Sends a message to the agent in a chat. Answers with the run: after waitSeconds at the latest, sooner "
            "if it has ended or waits for an answer (status waiting, pendingWaitpoint). The agent's words are "
            "in answer. Look at an unfinished run again with get_run.",
            "runs:write",
            start_run,
            {
                "chatId": TEXT,
                "message": {"type": "string", "minLength": 1, "maxLength": settings.MESSAGE_MAX_CHARS},
                "waitSeconds": {"type": "number", "minimum": 0, "maximum": WAIT_MAX_SECONDS, "default": 0},
                "model": {"type": "string", "description": "The name of a model; the default one if left out."},
                "tools": {
                    "type": "array",
                    "items": TEXT,
                    "description": "The names of the tools that the agent may call; all if left out.",
                },
                "attachmentIds": {"type": "array", "items": TEXT, "description": "Completed attachments."},
                "creditApprovalThreshold": {
                    "type": "number",
                    "minimum": 0,
                    "description": "A tool call that is estimated at more credits waits for approval.",
                },
                "maxCredits": {
                    "type": "number",
                    "exclusiveMinimum": 0,
                    "description": "The most credits that the run may spend.",
                },
                "onActiveRun": {
                    "type": "string",
                    "enum": ["reject", "enqueue"],
                    "default": "reject",
                    "description": "What to do if the chat has an active run: refuse, or wait in line behind it.",
                },
                **IDEMPOTENCY_KEY,
            },
            ("chatId", "message"),
        ),
        McpTool(
            "get_run",
            "Get a run",
            "A run with its status, tool calls, credits and pending waitpoint, and what the agent has said by now.",
            "runs:read",
            get_run,
            RUN_ID,
            ("runId",),
            reads=True,
        ),
        McpTool(
            "cancel_run",
            "Cancel a run",
            "Ends a run. A finished one stays as it is.",
            "runs:write",
            cancel_run,
            RUN_ID,
            ("runId",),
        ),
        McpTool(
            "respond_to_waitpoint",
            "Answer what a run waits for",
            "Approves or refuses credits (kind CREDIT_APPROVAL, approved), or answers a question (kind CLARIFICATION, "
            "answer). The first answer counts.",
            "waitpoints:respond",
            respond,
            {
                "waitpointId": TEXT,
                "kind": {"type": "string", "enum": list(ANSWERS)},
                "approved": {"type": "boolean", "description": "For CREDIT_APPROVAL."},
                "answer": {"type": "string", "minLength": 1, "maxLength": 10_000, "description": "For CLARIFICATION."},
            },
            ("waitpointId", "kind"),
        ),
        McpTool(
            "get_credits",
            "Get credits",
            "The user's balance, what is held for tool calls at work, and what is available.",
            "credits:read",
            get_credits,
            reads=True,
        ),
    )
}
