"""The tools of the MCP endpoint. Each is an action of the public surface, by its viewset, and needs the same scope."""

import hashlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from django.core.validators import RegexValidator
from rest_framework.request import Request
from rest_framework.schemas.openapi import AutoSchema
from rest_framework.serializers import BooleanField, ListField

from chats.serializers import ChatInput
from chats.views import ChatViewSet
from config.api import idempotency, pagination, ratelimit, serializers
from config.api.viewsets import ServiceViewSet
from config.kernel import money
from config.kernel.errors import Forbidden, ValidationFailed
from config.kernel.jsontext import dumps
from credits.views import AccountViewSet
from runs.calls import ANSWERS, AnswerKind, CallResultInput
from runs.models import FINAL_RUN_STATUSES, Awaiting, Run, RunStatus
from runs.serializers import RUN_STATE, RunInput
from runs.streams.views import opening_of
from runs.views import ChatRunViewSet, RunViewSet, ToolInvocationViewSet, WaitpointViewSet

WAIT_MAX_SECONDS = 60
Object = dict[str, Any]
# The fields of a waitpoint that a key without the scope runs:read sees.
WAITPOINT_STATE = {"id", "agentRunId", "kind", "status", "expiresAt", "resolvedAt"}


class PageInput(serializers.CamelSerializer):
    limit = serializers.StrictIntegerField(required=False, min_value=1, max_value=pagination.API_PAGE_SIZE_MAX)
    cursor = serializers.StrictCharField(required=False, help_text="The nextCursor of the page before.")


class KeyInput(serializers.CamelSerializer):
    idempotency_key = serializers.StrictCharField(
        required=False,
        trim_whitespace=False,
        min_length=1,
        max_length=255,
        validators=[RegexValidator("^[ -~]+$", "Use 1 to 255 printable ASCII characters.")],
        help_text="Any text of the caller's own: the same call with it within a day creates nothing more.",
    )


class StartInput(KeyInput):
    wait_seconds = serializers.StrictNumberField(required=False, default=0, min_value=0, max_value=WAIT_MAX_SECONDS)


class InputSchema(AutoSchema):
    """DRF's JSON Schema of a serializer, extended by our own fields."""

    def map_field(self, field: Any) -> dict[str, Any]:
        if own := getattr(field, "json_schema", None):
            return dict(own)
        if isinstance(field, serializers.CreditsNumberField):
            return {"type": "number"} | ({} if field.minimum is None else {"minimum": money.to_number(field.minimum)})
        schema: dict[str, Any] = super().map_field(field)
        if isinstance(field, BooleanField):
            schema["type"] = "boolean"
        if isinstance(field, ListField):
            self.map_field_validators(field.child, schema["items"])
        return schema

    def map_field_validators(self, field: Any, schema: dict[str, Any]) -> None:
        super().map_field_validators(field, schema)
        if "pattern" in schema:  # in the dialect of JSON Schema
            schema["pattern"] = schema["pattern"].replace(r"\A", "^").replace(r"\z", "$")


@dataclass(frozen=True)
class McpTool:
    """The ``action`` of a viewset. The argument ``path`` is the id in the action's path. The arguments of ``own`` are
    the action's query, or are for this call only; the others are its body, which one of the ``body`` serializers reads.
    ``shows``: for an action that creates an object, the viewset that shows the object. ``state``: the fields of the
    answer that a key without the scope runs:read gets; None for all.
    """

    view: type[ServiceViewSet]
    action: str
    path: str = ""
    own: type[serializers.CamelSerializer] = serializers.NoInput
    body: tuple[type[serializers.CamelSerializer], ...] = ()
    shows: type[ServiceViewSet] | None = None
    state: Collection[str] | None = None

    @property
    def scope(self) -> str:
        return self.view.required_scopes[self.action]

    @property
    def starts_run(self) -> bool:
        return self.action in self.view.throttle_run_starts

    def listing(self, name: str) -> dict[str, Any]:
        """The tool's entry in the answer to ``tools/list``."""
        schemas = [InputSchema().map_serializer(part()) for part in (self.own, *self.body)]
        path: dict[str, Any] = {self.path: {"type": "string"}} if self.path else {}
        properties = path | {key: field for schema in reversed(schemas) for key, field in schema["properties"].items()}
        # If there are several bodies, the fields that the first one requires are required for all.
        required = [*path, *(key for schema in schemas[:2] for key in schema.get("required", ()))]
        schema = {"type": "object", "properties": properties, "required": required}
        hints = {"readOnlyHint": self.scope.endswith(":read"), "openWorldHint": self.starts_run}
        about = {"name": name, "title": name.replace("_", " ").capitalize(), "description": DESCRIPTIONS[name]}
        return about | {"inputSchema": schema, "annotations": hints}


def call_tool(name: str, request: Request, arguments: dict[str, Any]) -> Any:
    """The result, or the Opening of a started run for which the call waits. ``request.auth`` is an API key. Raises
    DomainError, DRF's ValidationError.
    """
    tool = TOOLS[name]
    if not has_scope(request, tool.scope):
        raise Forbidden(f"This tool needs the scope {tool.scope}.", details={"requiredScope": tool.scope})
    if tool.starts_run:
        ratelimit.charge_caller(request._request, ratelimit.run_starts_of("public", request.user))
    path = {tool.path: arguments.get(tool.path)} if tool.path else {}
    if not isinstance(path.get(tool.path, ""), str):
        raise ValidationFailed({tool.path: ["A text is required."]})
    fields = tool.own().fields
    own = {key: value for key, value in arguments.items() if key in fields}
    body = {key: value for key, value in arguments.items() if key not in (*fields, tool.path)}
    given = tool.own.validated(own if tool.body else own | body)
    handle = prepared(request, tool.view, tool.action, path, own, body)
    if tool.shows is None or "idempotency_key" not in given:
        found = handle()
    else:
        digest = hashlib.sha256(dumps([name, path, sorted(body.items())])).hexdigest()
        made = idempotency.made_once(request.user, "mcp", given["idempotency_key"], digest, lambda: str(handle()["id"]))
        found = prepared(request, tool.shows, "retrieve", {str(tool.shows.lookup_url_kwarg): made}, {}, {})()
        if "title" in found and not has_scope(request, "chats:read"):
            # The chat may have got its title from its first message since it was made.
            found["title"] = body.get("title")
    # A repeated call finds the run in its present state, and does not wait if the run already needs the caller.
    needs_caller = found.get("status") == RunStatus.WAITING or found.get("awaiting") == Awaiting.CLIENT
    if given.get("wait_seconds") and found["status"] not in FINAL_RUN_STATUSES and not needs_caller:
        run = Run(pk=found["id"], status=found["status"], last_stream_index=found["lastStreamIndex"])
        return opening_of(request, run, run.last_stream_index)
    return found if tool.state is None else readable(request, found, tool.state)


def prepared(
    request: Request, view: type[ServiceViewSet], action: str, path: Object, query: Object, body: Object
) -> Callable[[], Object]:
    """A function that executes the action on the public surface. Checks that take time are made before it returns."""
    texts = {name: str(value) for name, value in query.items()}
    sent = SimpleNamespace(user=request.user, auth=request.auth, query_params=texts, data=body)
    handler: Any = view(surface="public", action=action, kwargs=path, request=sent, format_kwarg=None)
    handler.prepare()
    return lambda: dict(getattr(handler, action)(sent, **path).data)


def run_shown(request: Request, run_id: str) -> dict[str, Any]:
    return readable(request, prepared(request, RunViewSet, "retrieve", {"runId": run_id}, {}, {})(), RUN_STATE)


def readable(request: Request, found: dict[str, Any], state: Collection[str]) -> dict[str, Any]:
    if has_scope(request, "runs:read"):
        return found
    return {name: value for name, value in found.items() if name in state}


def has_scope(request: Request, scope: str) -> bool:
    key: Any = request.auth
    return scope in key.scopes


DESCRIPTIONS = {
    "list_chats": "The user's chats, newest first, as a page of items and a nextCursor.",
    "create_chat": "Creates a chat, in which runs can be started. With the clientId of a chat, that chat is the "
    "result.",
    "start_run": "Sends a message to the agent in a chat. Answers with the run: after waitSeconds at the latest, "
    "sooner if the run has ended, waits for an answer (status waiting, pendingWaitpoint) or awaits the caller's app "
    "(awaiting client, see submit_tool_result). The agent's text is in answer. Look at an unfinished run again "
    "with get_run.",
    "get_run": "A run with its status, tool calls, credits and pending waitpoint, and the agent's text so far.",
    "cancel_run": "Ends a run. A finished one stays unchanged.",
    "respond_to_waitpoint": "Approves or refuses credits (kind CREDIT_APPROVAL, approved), or answers a question (kind "
    "CLARIFICATION, answer; with a schema in its requestPayload: data that fits it, or declined). The first answer "
    "counts.",
    "submit_tool_result": "Gives the outcome of a tool call that awaits the caller's app (awaiting client): its "
    "result, or why it failed (error). The first counts.",
    "get_credits": "The user's balance, the credits held for tool calls in progress, and the available credits.",
}
TOOLS = {
    "list_chats": McpTool(ChatViewSet, "list", own=PageInput),
    "create_chat": McpTool(ChatViewSet, "create", own=KeyInput, body=(ChatInput,), shows=ChatViewSet),
    "start_run": McpTool(ChatRunViewSet, "create", "chatId", StartInput, (RunInput,), RunViewSet, RUN_STATE),
    "get_run": McpTool(RunViewSet, "retrieve", "runId"),
    "cancel_run": McpTool(RunViewSet, "cancel", "runId", state=RUN_STATE),
    "respond_to_waitpoint": McpTool(
        WaitpointViewSet, "respond", "waitpointId", body=(AnswerKind, *ANSWERS.values()), state=WAITPOINT_STATE
    ),
    "submit_tool_result": McpTool(ToolInvocationViewSet, "submit", "toolInvocationId", body=(CallResultInput,)),
    "get_credits": McpTool(AccountViewSet, "retrieve"),
}
