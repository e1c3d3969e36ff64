"""The admin of runs and their journal: search, the page of a run with its timeline and its content, and Cancel."""

from collections import defaultdict
from datetime import datetime
from functools import partial
from typing import Any

from django.conf import settings
from django.contrib import admin
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse
from unfold.decorators import action

from chats.models import Message
from config.api.authentication import DEMO_USER
from config.kernel.jsontext import to_text
from config.staff import base
from config.staff.actions import Did, WithActions, staff_action
from config.telemetry import logs
from credits import sums
from runs import models, services
from runs.admin import timeline
from runs.errors import RunError
from runs.models import Run, RunStatus

ROWS_MAX = 200
TEXT_MAX = 20_000
# The title of a step, and its texts by label, one or two (what went in and what came out).
Part = tuple[str, dict[str, str]]
pretty = partial(to_text, indent=2)

USER, RUN, CALL = base.user_column(), base.link_column("run_id", "run"), base.link_column("invocation_id", "tool call")


def is_cancellable(run: Run) -> bool:
    return not run.is_over and run.cancel_requested_at is None


@staff_action("runs.cancel_run", about="some", icon="cancel", danger=True, offered=is_cancellable)
def cancel(request: HttpRequest, run: Run, data: dict[str, Any]) -> Did | None:
    """The runs end: at once if they wait, within a second if they are running. Held credits are released; spent credits
    stay spent.
    """
    return Did(run, "Cancelled.") if services.cancel_run(run).cancel_requested_at else None


@admin.register(Run)
class RunAdmin(base.ReadOnly, WithActions):
    empty_text = "A run appears when a user sends a message."
    list_display = ("id", "state", "error_code", USER, "agent", "model_used", "credits", "created_at", "took")
    list_filter = ("status", "parked", base.choice_filter("error_code", "error", list(RunError)))
    unread = ("instructions", "output_schema", "output")
    list_select_related = ("user",)
    # A longer text does not fit into the search field; docs/admin.md has the whole list.
    search_help_text = "Run, chat or other id, user, error code"
    url_lookups = ("user__id__exact", "agent")
    id_fields = {"chat": "chat_id"}
    fields = ()
    state = base.status_column(RunStatus)
    credits = base.credits_column("spent", "credits")
    model_used = base.column("model", lambda run: run.resolved_model or run.requested_model or "–")
    took = base.column("Took", lambda run: base.span(run.finished_at - run.created_at) if run.finished_at else "–")
    actions_detail = ("content",)
    staff_actions = (cancel,)

    def find(self, word: str) -> Q:
        if word.upper() in list(RunError):
            return Q(error_code=word.upper())
        model: Any = {"msg": Message, "inv": models.ToolInvocation, "wp": models.Waitpoint}.get(word.partition("_")[0])
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

    def render_change_form(self, request: HttpRequest, context: dict[str, Any], *args: Any, **options: Any) -> Any:
        run = context["original"]
        failed = models.ModelAttempt.objects.filter(run=run, next_model="").order_by("-turn_index", "-number").first()
        if failed is not None and run.error_code and failed.reason == run.failure_reason:
            context["failed"] = failed
            context["provider"] = models.Provider.objects.filter(name=failed.provider).only("pk").first()
        # Version, trace, span and flags.
        trace = run.trace_parent.split("-")[1] if run.trace_parent else ""
        context |= {"title": "Run", "subtitle": run.pk, "tone": RunStatus.tones()[run.status]}
        context |= {"trace": trace, "trace_url": settings.TRACE_URL.replace("{trace}", trace)}
        context |= {"timeline": timeline.build(run), "reasons": timeline.reasons(run)}
        context["agent"] = models.Agent.objects.filter(name=run.agent_name).only("pk").first() if run.agent else None
        context["agent_version"] = (run.agent or "").partition("@")[2]
        context["model"] = run.resolved_model or run.requested_model or ""
        context["model_row"] = models.AgentModel.objects.filter(name=context["model"]).only("pk").first()
        # The playground shows people their own chats only. After the sign-in of `make run`, that person is DEMO_USER.
        demo = settings.EMBEDDED and not settings.SESSION_ISSUER and run.user.get_username() == DEMO_USER
        context["playground"] = settings.PLAYGROUND and (run.user_id == request.user.pk or demo)
        return super().render_change_form(request, context, *args, **options)

    def has_read_permission(self, request: HttpRequest, object_id: Any = None) -> bool:
        return request.user.has_perm("runs.read_run_content")

    # Not with the permission's name: Unfold would look for it in the database at each start.
    @action(description="Messages and results", icon="lock_open", permissions=["read"])
    def content(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """The content of the run, for staff with the permission; each access makes a log entry."""
        run = self.row(request, object_id)
        self.log_change(request, run, "Read its messages and results.")
        shown = {"parts": content_of(run), "text_max": TEXT_MAX}
        return self.page(request, "admin/runs/run/content.html", "Messages and results", run, **shown)


def content_of(run: Run) -> list[Part]:
    """What the run's user and models said, in the order of the journal; long texts are cut. It belongs to the user, and
    no other page of the admin shows it.
    """
    messages = Message.objects.filter(run_id=run.pk).order_by("created_at", "pk")[:ROWS_MAX]
    parts: list[Part] = [(f"Message of the {message.role}", {"": message.content}) for message in messages]
    output = None if run.output is None else pretty(run.output)
    whole = {"Instructions of the run": run.instructions, "Output": output, "Error": run.error_message}
    parts += [(title, {"": text}) for title, text in whole.items() if text]
    # By turn, call and, of one call, what came first.
    journal: list[tuple[tuple[int, int, int], str, dict[str, str]]] = []
    results: defaultdict[int, list[str]] = defaultdict(list)
    for call in models.ToolInvocation.objects.filter(run=run).order_by("turn_index", "call_index")[:ROWS_MAX]:
        said = (call.progress or {}).get("message")
        result = "\n".join(filter(None, [said, call.result, *call.result_urls, call.error_message]))
        results[call.turn_index].append(f"{call.name}: {result[:TEXT_MAX]}")
        title = f"Call {call.turn_index}.{call.call_index} {call.name}"
        journal.append(((call.turn_index, call.call_index, 0), title, {"Input": pretty(call.input), "Output": result}))
    asked = [message.content for message in messages if message.role == "user"]
    for turn in models.Turn.objects.filter(run=run).order_by("index")[:ROWS_MAX]:
        sent = results[turn.index - 1] or (asked if turn.index == 1 else [])
        answer = [turn.text] if turn.text else []
        answer += [f"{call.get('name')} {call.get('arguments')}" for call in turn.tool_calls]
        answer += [f"Not accepted: {call['told']}" for call in turn.tool_calls if call.get("told")]
        both = {"New in the input": "\n\n".join(sent), "Output": "\n\n".join(answer)}
        journal.append(((turn.index, 0, 0), f"Turn {turn.index}", both))
    summaries = models.Compaction.objects.filter(run=run, kind=models.CompactionKind.SUMMARY)
    for step in summaries.order_by("index")[:ROWS_MAX]:
        journal.append(((step.turn_index, -1, 0), f"Compaction {step.index}: summary", {"": step.text}))
    attempts = models.ModelAttempt.objects.filter(run=run).exclude(detail="")
    for attempt in attempts.order_by("turn_index", "compaction", "number")[:ROWS_MAX]:
        title = f"{attempt.step}, attempt {attempt.number}: what the provider said"
        journal.append(((attempt.turn_index, -1 if attempt.compaction else 0, 0), title, {"": attempt.detail}))
    for point in models.Waitpoint.objects.filter(run=run).select_related("invocation").order_by("pk")[:ROWS_MAX]:
        both = {"Asked": pretty(point.request_payload), "Answer": pretty(point.resolved_payload)}
        about = point.invocation
        place = (about.turn_index, about.call_index, 1) if about else (run.turn_count + 1, 0, 0)
        journal.append((place, point.get_kind_display(), both))
    return parts + [(title, texts) for _, title, texts in sorted(journal, key=lambda entry: entry[0])]


def approved_at(calls: set[str]) -> dict[str, datetime]:
    """When users approved these tool calls; the approval that a policy gave is not among them."""
    rows = models.Waitpoint.objects.filter(
        invocation_id__in=calls, kind=models.WaitpointKind.CREDIT_APPROVAL, status=models.WaitpointStatus.COMPLETED
    ).values_list("invocation_id", "resolved_at", "resolved_payload")
    return {call: at for call, at, payload in rows if at and (payload or {}).get("approved")}


class OfRun(base.ReadOnly, base.StaffAdmin):
    """A search finds rows by the id of their run, or by their own."""

    search_help_text = "A run's id, or the row's own"
    id_fields = {"run": "run_id"}


@admin.register(models.Turn)
class TurnAdmin(OfRun):
    list_display = ("index", RUN, "model", "input_tokens", "output_tokens", "credits", "finished_at")
    fields = (RUN, "index", "model", "input_tokens", "output_tokens", "credits", "started_at", "finished_at")
    search_help_text = "A run's id"
    unread = ("text", "tool_calls")
    credits = base.credits_column("cost", "credits")


@admin.register(models.ToolInvocation)
class ToolInvocationAdmin(OfRun):
    state = base.status_column(models.InvocationStatus)
    list_display = ("id", RUN, "name", "state", "error_code", "credits", "duration_ms", "created_at")
    about = (("id", RUN), ("turn_index", "call_index"), ("name", "node_type"), ("status", "error_code"))
    fields = (*about, ("credits", "repeatable"), ("created_at", "started_at"), ("finished_at", "duration_ms"))
    unread = ("input", "result", "result_urls", "error_message")
    credits = base.credits_column("credit_used", "credits")


@admin.register(models.Waitpoint)
class WaitpointAdmin(OfRun):
    state = base.status_column(models.WaitpointStatus)
    list_display = ("id", RUN, "kind", "state", "created_at", "expires_at", "resolved_at")
    fields = ("id", RUN, CALL, "kind", "status", "created_at", "expires_at", "resolved_at")
    unread = ("request_payload", "resolved_payload")


@admin.register(models.RunEvent)
class RunEventAdmin(OfRun):
    # The order is that of the key. The list shows all of an event, so it has no page of its own.
    ordering = ("-run_id", "-index")
    list_display_links = None
    list_display = (RUN, "index", "type", "created_at")
    search_help_text = "A run's id"
    unread = ("data",)

    def get_object(self, request: Any, object_id: str, from_field: str | None = None) -> None:
        return None
