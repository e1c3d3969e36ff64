"""The admin of a run's journal and stream events, read-only. It shows no message, input or result."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.contrib import admin
from django.db.models import Q

from config.kernel import money
from config.staff.base import NOTHING, ReadOnly, StaffAdmin, link_column, status_column
from runs.models import InvocationStatus, RunEvent, ToolInvocation, Turn, Waitpoint, WaitpointKind, WaitpointStatus

RUN = link_column("run_id", "run")


def approved_at(calls: set[str]) -> dict[str, datetime]:
    """When users approved these tool calls; the approval that a policy gave is not among them."""
    rows = Waitpoint.objects.filter(
        invocation_id__in=calls, kind=WaitpointKind.CREDIT_APPROVAL, status=WaitpointStatus.COMPLETED
    ).values_list("invocation_id", "resolved_at", "resolved_payload")
    return {call: at for call, at, payload in rows if at and (payload or {}).get("approved")}


def credits_column(name: str) -> Any:
    """A column of credits; the field ``name`` holds micro-credits."""

    @admin.display(description="credits")
    def credits(model_admin: Any, row: Any) -> str:
        return money.to_text(getattr(row, name))

    return credits


class OfRun(ReadOnly, StaffAdmin):
    """A search finds rows by the id of their run, or by their own."""

    search_help_text = "A run's id, or the row's own"
    prefix = ""
    # The columns with the user's content, which are not even read.
    hidden: tuple[str, ...] = ()

    def get_queryset(self, request: Any) -> Any:
        return super().get_queryset(request).defer(*self.hidden)

    def find(self, word: str) -> Q:
        if word.startswith("run_"):
            return Q(run_id=word)
        return Q(pk=word) if self.prefix and word.startswith(f"{self.prefix}_") else NOTHING


@admin.register(Turn)
class TurnAdmin(OfRun):
    list_display = ("__str__", RUN, "model", "input_tokens", "output_tokens", "credits", "finished_at")
    fields = ("run_id", "index", "model", "input_tokens", "output_tokens", "credits", "started_at", "finished_at")
    readonly_fields = ("run_id", "credits")
    search_help_text = "A run's id"
    hidden = ("text", "tool_calls")
    credits = credits_column("cost")


@admin.register(ToolInvocation)
class ToolInvocationAdmin(OfRun):
    prefix = "inv"
    state = status_column(InvocationStatus)
    list_display = ("id", RUN, "name", "state", "error_code", "credits", "duration_ms", "created_at")
    fields = (
        "id",
        "run_id",
        "turn_index",
        "call_index",
        "name",
        "node_type",
        "status",
        "error_code",
        "credits",
        "repeatable",
        "created_at",
        "started_at",
        "finished_at",
        "duration_ms",
    )
    readonly_fields = ("run_id", "credits", "duration_ms")
    hidden = ("input", "result", "result_urls", "error_message")
    credits = credits_column("credit_used")


@admin.register(Waitpoint)
class WaitpointAdmin(OfRun):
    prefix = "wp"
    state = status_column(WaitpointStatus)
    list_display = ("id", RUN, "kind", "state", "created_at", "expires_at", "resolved_at")
    fields = ("id", "run_id", "invocation_id", "kind", "status", "created_at", "expires_at", "resolved_at")
    readonly_fields = ("run_id", "invocation_id")
    hidden = ("request_payload", "resolved_payload")


@admin.register(RunEvent)
class RunEventAdmin(OfRun):
    # The order is that of the key. The list shows all of an event, so it has no page of its own.
    ordering = ("-run_id", "-index")
    list_display_links = None
    list_display = ("__str__", RUN, "index", "type", "created_at")
    search_help_text = "A run's id"
    hidden = ("data",)

    def get_object(self, request: Any, object_id: str, from_field: str | None = None) -> None:
        return None
