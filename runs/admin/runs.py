"""The admin of runs and their journal: search, the page of a run with its timeline and its content, and Cancel."""

from datetime import datetime
from typing import Any

from django.conf import settings
from django.contrib import admin
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from unfold.decorators import action

from chats.models import Chat, Message
from config.api.authentication import DEMO_USER
from config.staff.actions import Action, Did, WithActions
from config.staff.base import (
    ReadOnly,
    StaffAdmin,
    choice_filter,
    credits_column,
    link_column,
    list_links,
    page_of,
    span,
    status_column,
    user_column,
)
from config.telemetry import logs
from credits import sums
from runs import services
from runs.admin import content, timeline
from runs.errors import RunError
from runs.models import (
    FINAL_RUN_STATUSES,
    Agent,
    AgentModel,
    InvocationStatus,
    ModelAttempt,
    Provider,
    Run,
    RunEvent,
    RunStatus,
    ToolInvocation,
    Turn,
    Waitpoint,
    WaitpointKind,
    WaitpointStatus,
)

RUN, CALL = link_column("run_id", "run"), link_column("invocation_id", "tool call")


def cancel(request: HttpRequest, run: Run, data: dict[str, Any]) -> Did | None:
    return Did(run, "Cancelled.") if services.cancel_run(run).cancel_requested_at is not None else None


@admin.register(Run)
class RunAdmin(ReadOnly, WithActions):
    empty_text = "A run appears when a user sends a message."
    list_display = ("id", "state", "error_code", user_column(), "agent", "model_used", "credits", "created_at", "took")
    list_filter = ("status", "parked", choice_filter("error_code", "error", list(RunError)))
    unread = ("instructions", "output_schema", "output")
    list_select_related = ("user",)
    # A longer text does not fit into the search field; docs/admin.md has the whole list.
    search_help_text = "Run, chat or other id, user, error code"
    url_lookups = ("user__id__exact", "agent")
    id_fields = {"chat": "chat_id"}
    fields = ()
    state = status_column(RunStatus)
    credits = credits_column("spent", "credits")
    actions_detail = ("content",)
    staff_actions = (
        Action(
            name="cancel",
            label="Cancel",
            permission="runs.cancel_run",
            question="The runs end: at once if they wait, within a second if they are running. Held credits are "
            "released; spent credits stay spent.",
            apply=cancel,
            icon="cancel",
            danger=True,
            offered=lambda run: run.status not in FINAL_RUN_STATUSES and run.cancel_requested_at is None,
        ),
    )

    def find(self, word: str) -> Q:
        if word.upper() in list(RunError):
            return Q(error_code=word.upper())
        model: Any = {"msg": Message, "inv": ToolInvocation, "wp": Waitpoint}.get(word.partition("_")[0])
        if "_" not in word or model is None:
            return super().find(word)
        return Q(pk__in=list(model.objects.filter(pk=word).exclude(run_id=None).values_list("run_id", flat=True)))

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Any:
        run = super().get_object(request, object_id, from_field)
        if run is not None:
            logs.run_id.set(run.pk)
        return run

    def get_queryset(self, request: HttpRequest) -> QuerySet[Run]:
        return super().get_queryset(request).annotate(spent=sums.run_spent_subquery())

    @admin.display(description="model")
    def model_used(self, run: Run) -> str:
        return run.resolved_model or run.requested_model or "–"

    def took(self, run: Run) -> str:
        return span(run.finished_at - run.created_at) if run.finished_at else "–"

    def render_change_form(self, request: HttpRequest, context: dict[str, Any], *args: Any, **options: Any) -> Any:
        run = context["original"]
        failed = ModelAttempt.objects.filter(run=run, next_model="").order_by("-turn_index", "-number").first()
        if failed is not None and run.error_code and failed.reason == run.failure_reason:
            context["failed"] = failed
            context["provider"] = Provider.objects.filter(name=failed.provider).only("pk").first()
        # Version, trace, span and flags.
        trace = run.trace_parent.split("-")[1] if run.trace_parent else ""
        context |= {"title": "Run", "subtitle": run.pk, "tone": RunStatus.tones()[run.status]}
        context |= {"trace": trace, "trace_url": settings.TRACE_URL.replace("{trace}", trace)}
        context |= {"timeline": timeline.build(run), "reasons": timeline.reasons(run)}
        context |= {"about": self._about(request, run), "links": self._links(request, run)}
        return super().render_change_form(request, context, *args, **options)

    def _about(self, request: HttpRequest, run: Run) -> list[tuple[str, str, str]]:
        """Label, name and address of what the run is about; the address only if the signed-in person may open it."""
        model = run.resolved_model or run.requested_model or ""
        found = [
            ("user", run.user.get_username(), "auth.view_user", reverse("person", args=[run.user_id])),
            ("chat", run.chat_id, "chats.view_chat", page_of(Chat, run.chat_id)),
        ]
        if run.agent:
            agent = Agent.objects.filter(name=run.agent_name).only("pk").first()
            versions = reverse("admin:runs_agent_versions", args=[agent.pk]) if agent else ""
            number = run.agent.partition("@")[2]
            found.append(("agent", run.agent, "runs.view_agent", versions and f"{versions}?right={number}"))
        row = AgentModel.objects.filter(name=model).only("pk").first()
        page = page_of(AgentModel, str(row.pk)) if row else ""
        found.append(("model", model or "the default one", "runs.view_agentmodel", page))
        return [(label, name, url if request.user.has_perm(may) else "") for label, name, may, url in found]

    def _links(self, request: HttpRequest, run: Run) -> list[tuple[str, str]]:
        """Links to related pages, those that the signed-in person may open."""
        lists = [
            ("All of this user's runs", "runs_run", f"user__id__exact={run.user_id}"),
            ("This chat's runs", "runs_run", f"q={run.chat_id}"),
        ]
        about = {"Ledger rows": "credits_ledgerentry", "Tool calls": "runs_toolinvocation"}
        about |= {"Deliveries": "webhooks_delivery", "Stream events": "runs_runevent"}
        shown = list_links(request, [*lists, *((label, model, f"q={run.pk}") for label, model in about.items())])
        if request.user.has_perm("credits.view_account"):
            shown.append(("Account", reverse("admin:credits_account_change", args=[run.user_id])))
        # The playground shows people their own chats only. After the sign-in of `make run`, that person is DEMO_USER.
        demo = settings.EMBEDDED and not settings.SESSION_ISSUER and run.user.get_username() == DEMO_USER
        if run.replaced_by is not None:
            shown.append(("Replaced by", reverse("admin:runs_run_change", args=[run.replaced_by])))
        if settings.PLAYGROUND and (run.user_id == request.user.pk or demo):
            shown.append(("Open the chat in the playground", f"/playground/{run.chat_id}"))
        return shown

    def has_read_permission(self, request: HttpRequest, object_id: Any = None) -> bool:
        return request.user.has_perm("runs.read_run_content")

    # Not with the permission's name: Unfold would look for it in the database at each start.
    @action(description="Messages and results", icon="lock_open", permissions=["read"])
    def content(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """The content of the run, for staff with the permission; each access makes a log entry."""
        run = self.row(request, object_id)
        self.log_change(request, run, "Read its messages and results.")
        return self.page(request, "admin/runs/run/content.html", "Messages and results", run, parts=content.read(run))


def approved_at(calls: set[str]) -> dict[str, datetime]:
    """When users approved these tool calls; the approval that a policy gave is not among them."""
    rows = Waitpoint.objects.filter(
        invocation_id__in=calls, kind=WaitpointKind.CREDIT_APPROVAL, status=WaitpointStatus.COMPLETED
    ).values_list("invocation_id", "resolved_at", "resolved_payload")
    return {call: at for call, at, payload in rows if at and (payload or {}).get("approved")}


class OfRun(ReadOnly, StaffAdmin):
    """A search finds rows by the id of their run, or by their own."""

    search_help_text = "A run's id, or the row's own"
    id_fields = {"run": "run_id"}


@admin.register(Turn)
class TurnAdmin(OfRun):
    list_display = ("index", RUN, "model", "input_tokens", "output_tokens", "credits", "finished_at")
    fields = (RUN, "index", "model", "input_tokens", "output_tokens", "credits", "started_at", "finished_at")
    readonly_fields = (RUN, "credits")
    search_help_text = "A run's id"
    unread = ("text", "tool_calls")
    credits = credits_column("cost", "credits")


@admin.register(ToolInvocation)
class ToolInvocationAdmin(OfRun):
    state = status_column(InvocationStatus)
    list_display = ("id", RUN, "name", "state", "error_code", "credits", "duration_ms", "created_at")
    fields = (
        ("id", RUN),
        ("turn_index", "call_index"),
        ("name", "node_type"),
        ("status", "error_code"),
        ("credits", "repeatable"),
        ("created_at", "started_at"),
        ("finished_at", "duration_ms"),
    )
    readonly_fields = (RUN, "credits", "duration_ms")
    unread = ("input", "result", "result_urls", "error_message")
    credits = credits_column("credit_used", "credits")


@admin.register(Waitpoint)
class WaitpointAdmin(OfRun):
    state = status_column(WaitpointStatus)
    list_display = ("id", RUN, "kind", "state", "created_at", "expires_at", "resolved_at")
    fields = ("id", RUN, CALL, "kind", "status", "created_at", "expires_at", "resolved_at")
    readonly_fields = (RUN, CALL)
    unread = ("request_payload", "resolved_payload")


@admin.register(RunEvent)
class RunEventAdmin(OfRun):
    # The order is that of the key. The list shows all of an event, so it has no page of its own.
    ordering = ("-run_id", "-index")
    list_display_links = None
    list_display = (RUN, "index", "type", "created_at")
    search_help_text = "A run's id"
    unread = ("data",)

    def get_object(self, request: Any, object_id: str, from_field: str | None = None) -> None:
        return None
