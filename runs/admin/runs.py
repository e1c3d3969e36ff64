"""The admin of runs: search, the page of one run with its timeline and its content, and the action Cancel."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.contrib import admin
from django.contrib.admin.utils import unquote
from django.core.exceptions import PermissionDenied
from django.db.models import Q, QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.utils.html import format_html

from chats.models import Message
from config.api.authentication import DEMO_USER
from config.staff.actions import Action, Did, WithActions
from config.staff.base import NOTHING, ReadOnly, link_column, of_user, page_of, status_column
from config.staff.words import span
from config.telemetry import logs
from runs import services
from runs.admin import content, reports, timeline
from runs.errors import FailureReason, RunError
from runs.models import FINAL_RUN_STATUSES, Run, RunStatus, ToolInvocation, Waitpoint

# version-trace-span-flags
TRACE_PARENT_PARTS = 4
CHAT = link_column("chat_id", "chat")


def cancel(request: HttpRequest, run: Run, data: dict[str, Any]) -> Did | None:
    # Read again: the run may have ended while the confirmation page was open.
    current = Run.objects.get(pk=run.pk)
    if current.status in FINAL_RUN_STATUSES or current.cancel_requested_at is not None:
        return None
    services.cancel_run(current)
    return Did(run, "Cancelled.")


def trace_of(run: Run) -> tuple[str, str] | None:
    """The id of the run's trace, and its address in the tracing backend; "" without TRACE_URL."""
    parts = (run.trace_parent or "").split("-")
    if len(parts) != TRACE_PARENT_PARTS:
        return None
    return parts[1], settings.TRACE_URL.replace("{trace}", parts[1])


class ErrorFilter(admin.SimpleListFilter):
    """A filter with fixed choices; Django's own filter reads the whole table to find the codes."""

    title, parameter_name = "error", "error_code"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(code, code) for code in RunError]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Run]) -> QuerySet[Run]:
        return queryset.filter(error_code=self.value()) if self.value() in list(RunError) else queryset


@admin.register(Run)
class RunAdmin(ReadOnly, WithActions):
    empty_text = "A run appears when a user sends a message."
    list_display = ("id", "state", "who", "created_at", "took", "error_code", "resolved_model", CHAT)
    list_filter = ("status", ErrorFilter)
    list_select_related = ("user",)
    # A longer text does not fit into the search field; docs/admin.md has the whole list.
    search_help_text = "Run, chat or other id, user, error code"
    url_lookups = ("user__id__exact", "agent")
    fields = ()
    state = status_column(RunStatus)
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
        prefix = word.partition("_")[0] if "_" in word else ""
        if prefix == "run":
            return Q(pk=word)
        if prefix == "chat":
            return Q(chat_id=word)
        found: QuerySet[Any] | None = {
            "msg": Message.objects.filter(pk=word).values_list("run_id", flat=True),
            "inv": ToolInvocation.objects.filter(pk=word).values_list("run_id", flat=True),
            "wp": Waitpoint.objects.filter(pk=word).values_list("run_id", flat=True),
        }.get(prefix)
        if found is not None:
            run_id = found.first()
            return Q(pk=run_id) if run_id else NOTHING
        return of_user(word)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Run]:
        return super().get_queryset(request).select_related("user").defer("instructions", "output_schema", "output")

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Any:
        run = super().get_object(request, object_id, from_field)
        if run is not None:
            logs.run_id.set(run.pk)
        return run

    @admin.display(description="user")
    def who(self, run: Run) -> str:
        return format_html('<a href="{}">{}</a>', reverse("person", args=[run.user_id]), run.user.get_username())

    @admin.display(description="took")
    def took(self, run: Run) -> str:
        return span(run.finished_at - run.created_at) if run.finished_at else "–"

    def get_urls(self) -> list[Any]:
        view = self.admin_site.admin_view(self.content_view)
        return [
            path("reports/", self.admin_site.admin_view(reports.show), name="runs_reports"),
            path("<path:object_id>/content/", view, name="runs_run_content"),
            *super().get_urls(),
        ]

    def render_change_form(self, request: HttpRequest, context: dict[str, Any], *args: Any, **options: Any) -> Any:
        run = context["original"]
        context["title"], context["subtitle"] = "Run", run.pk
        context["timeline"] = timeline.build(run)
        context["tone"] = RunStatus.tones()[run.status]
        context["explanation"] = next((code.sentence for code in RunError if code == run.error_code), "")
        context["reason"] = next((reason for reason in FailureReason if reason == run.failure_reason), None)
        context["links"] = self._links(request, run)
        context["trace"] = trace_of(run)
        return super().render_change_form(request, context, *args, **options)

    def _links(self, request: HttpRequest, run: Run) -> list[tuple[str, str]]:
        """Links to related pages, those that the signed-in person may open."""

        def list_of(app: str, model: str, query: str) -> str:
            return f"{reverse(f'admin:{app}_{model}_changelist')}?{query}"

        links = [
            ("All of this user's runs", "runs.view_run", list_of("runs", "run", f"user__id__exact={run.user_id}")),
            ("This chat's runs", "runs.view_run", list_of("runs", "run", f"q={run.chat_id}")),
            ("Account", "credits.view_account", reverse("admin:credits_account_change", args=[run.user_id])),
            ("Ledger rows", "credits.view_ledgerentry", list_of("credits", "ledgerentry", f"q={run.pk}")),
            ("Tool calls", "runs.view_toolinvocation", list_of("runs", "toolinvocation", f"q={run.pk}")),
            ("Deliveries", "webhooks.view_delivery", list_of("webhooks", "delivery", f"q={run.pk}")),
            ("Stream events", "runs.view_runevent", list_of("runs", "runevent", f"q={run.pk}")),
            (
                "Messages and results (access is logged)",
                "runs.read_run_content",
                reverse("admin:runs_run_content", args=[run.pk]),
            ),
        ]
        shown = [(label, url) for label, permission, url in links if request.user.has_perm(permission)]
        # The playground shows people their own chats only. After the sign-in of `make run`, that person is DEMO_USER.
        demo = settings.EMBEDDED and not settings.SESSION_ISSUER and run.user.get_username() == DEMO_USER
        if settings.PLAYGROUND and (run.user_id == request.user.pk or demo):
            shown.append(("Open the chat in the playground", f"/playground/{run.chat_id}"))
        return shown

    def content_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """The content of the run, for staff with the permission; each access makes a log entry."""
        if not request.user.has_perm("runs.read_run_content"):
            raise PermissionDenied
        run: Any = self.get_object(request, unquote(object_id))
        if run is None:
            raise Http404
        self.log_change(request, run, "Read its messages and results.")
        context = self.admin_site.each_context(request) | {
            "title": "Messages and results",
            "subtitle": run.pk,
            "opts": self.opts,
            "run": run,
            "parts": content.read(run),
            "back": page_of(Run, run.pk),
        }
        return TemplateResponse(request, "admin/runs/run/content.html", context)
