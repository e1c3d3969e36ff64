"""The timeline of one run for its page in the admin: what happened, when, how long it took and what it cost.

It takes a fixed number of queries, each of at most ROWS_MAX rows. It has no message, input or result (see
``content.py``).
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Count, Max, Min, Prefetch

from config.kernel import clock, money
from credits.models import EntryType, LedgerEntry
from runs.events import StreamType
from runs.models import InvocationStatus, Run, RunEvent, RunStatus, ToolInvocation, Turn, Waitpoint, WaitpointStatus
from webhooks.catalogue import Event
from webhooks.models import Attempt, Delivery

ROWS_MAX = 200


@dataclass
class Step:
    """One row of the timeline. ``left`` and ``width`` are percentages of the run's duration."""

    kind: str
    icon: str
    title: str
    started: datetime
    ended: datetime | None
    detail: str = ""
    status: str = ""
    tone: str = "default"
    key: str = ""
    charges: list[LedgerEntry] = field(default_factory=list)
    deliveries: list[Delivery] = field(default_factory=list)
    offset: str = ""
    duration: str = ""
    left: float = 0.0
    width: float = 0.0

    @property
    def cost(self) -> str:
        """The credits that the step spent, or still holds."""
        if not self.charges:
            return ""
        held = sum(_held(entry) for entry in self.charges)
        return f"{money.to_text(held)} held" if held else money.to_text(sum(_spent(entry) for entry in self.charges))

    @property
    def webhooks(self) -> list[tuple[Delivery, str]]:
        """The deliveries with the tones of their statuses."""
        return [(delivery, Delivery.Status.tones()[delivery.status]) for delivery in self.deliveries]


@dataclass
class Timeline:
    run: Run
    steps: list[Step]
    entries: list[LedgerEntry]
    deliveries: list[Delivery]
    events: list[dict[str, Any]]
    facts: list[tuple[str, str]]
    more: list[str]


def build(run: Run) -> Timeline:
    """``run`` comes with its chat and user. ``more`` names the kinds of rows of which there are over ROWS_MAX."""
    more: list[str] = []

    def capped(rows: Any, what: str) -> list[Any]:
        found = list(rows[: ROWS_MAX + 1])
        if len(found) > ROWS_MAX:
            more.append(what)
        return found[:ROWS_MAX]

    turns = capped(Turn.objects.filter(run=run).defer("text", "tool_calls").order_by("index"), "turns")
    calls = capped(
        ToolInvocation.objects.filter(run=run)
        .defer("input", "result", "result_urls", "error_message")
        .order_by("turn_index", "call_index"),
        "tool calls",
    )
    waitpoints = capped(
        Waitpoint.objects.filter(run=run).defer("request_payload", "resolved_payload").order_by("pk"), "waitpoints"
    )
    entries = capped(LedgerEntry.objects.filter(run_id=run.pk).order_by("created_at", "pk"), "charges")
    attempts = Prefetch("attempts", Attempt.objects.defer("answer").order_by("number"))
    deliveries = capped(
        Delivery.objects.filter(run_id=run.pk).order_by("pk").prefetch_related(attempts), "webhook deliveries"
    )
    states = capped(RunEvent.objects.filter(run=run, type=StreamType.RUN_STATUS).order_by("index"), "changes of state")
    events: list[Any] = list(
        RunEvent.objects.filter(run=run)
        .order_by()
        .values("type")
        .annotate(count=Count("pk"), first=Min("created_at"), last=Max("created_at"))
        .order_by("first", "type")
    )
    now = clock.now()
    steps = [*_states(run, states), *_turns(turns), *_calls(calls), *_waitpoints(waitpoints)]
    _attach(steps, entries, deliveries)
    steps.sort(key=lambda step: (step.started, step.kind != "state"))
    _draw(run, steps, now)
    return Timeline(run, steps, entries, deliveries, events, _facts(run, entries, turns, calls, now), more)


def _states(run: Run, recorded: list[RunEvent]) -> list[Step]:
    """From the run's stream or, after its pruning, from the run itself."""
    changes = [(str(json.loads(event.data).get("status", "")), event.created_at) for event in recorded]
    if not changes:
        changes = [(RunStatus.QUEUED, run.created_at)]
        if run.started_at:
            changes.append((RunStatus.RUNNING, run.started_at))
        if run.finished_at:
            changes.append((run.status, run.finished_at))
    ends: list[datetime | None] = [at for _, at in changes[1:]]
    ends.append(None if run.finished_at is None else changes[-1][1])
    return [
        Step("state", "flag", status, at, end, status=status, tone=RunStatus.tones()[status])
        for (status, at), end in zip(changes, ends, strict=True)
    ]


def _turns(turns: list[Turn]) -> list[Step]:
    return [
        Step(
            "turn",
            "sync",
            f"Turn {turn.index}",
            turn.started_at,
            turn.finished_at,
            f"{turn.model}, {turn.input_tokens:,} tokens in, {turn.output_tokens:,} out",
            tone="info",
            key=str(turn.index),
        )
        for turn in turns
    ]


def _calls(calls: list[ToolInvocation]) -> list[Step]:
    return [
        Step(
            "call",
            "build",
            call.name,
            call.started_at or call.created_at,
            call.finished_at,
            f"call {call.turn_index}.{call.call_index}" + (f", {call.error_code}" if call.error_code else ""),
            call.status,
            InvocationStatus.tones()[call.status],
            call.pk,
        )
        for call in calls
    ]


def _waitpoints(waitpoints: list[Waitpoint]) -> list[Step]:
    return [
        Step(
            "waitpoint",
            "pause_circle",
            waitpoint.get_kind_display(),
            waitpoint.created_at,
            waitpoint.resolved_at,
            "answered" if waitpoint.status == WaitpointStatus.COMPLETED else "",
            waitpoint.status,
            WaitpointStatus.tones()[waitpoint.status],
        )
        for waitpoint in waitpoints
    ]


def _attach(steps: list[Step], entries: list[LedgerEntry], deliveries: list[Delivery]) -> None:
    """Attach each charge and each delivery to the step that caused it."""
    turns = {step.key: step for step in steps if step.kind == "turn"}
    calls = {step.key: step for step in steps if step.kind == "call"}
    for entry in entries:
        step = calls.get(entry.invocation_id or "")
        if step is None and entry.type == EntryType.USAGE:
            step = turns.get(entry.cause.rpartition(":")[2])
        if step is not None:
            step.charges.append(entry)
    states: defaultdict[str, list[Step]] = defaultdict(list)
    for step in steps:
        if step.kind == "state":
            states[step.status].append(step)
    for delivery in deliveries:
        call_id = _body(delivery).get("toolInvocationId")
        if call_id in calls:
            calls[call_id].deliveries.append(delivery)
        elif queue := states[_run_status(delivery)]:
            # Both are in the order of time; the last step takes the remaining deliveries.
            (queue.pop(0) if len(queue) > 1 else queue[0]).deliveries.append(delivery)


def _run_status(delivery: Delivery) -> str:
    """The status of the run that the delivery reports; "" if its event no longer exists."""
    return next((event.stream_status for event in Event if event == delivery.event_type), "")


def _body(delivery: Delivery) -> dict[str, Any]:
    try:
        body = json.loads(delivery.body)
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def _draw(run: Run, steps: list[Step], now: datetime) -> None:
    begin = run.created_at
    end = max([run.finished_at or now, *(step.ended for step in steps if step.ended)])
    whole = max((end - begin).total_seconds(), 0.001)
    for step in steps:
        lasted = (step.ended or end) - step.started
        left = min(100.0, max(0.0, (step.started - begin).total_seconds() / whole * 100))
        step.left = round(left, 2)
        step.width = round(min(100.0 - left, max(0.0, lasted.total_seconds() / whole * 100)), 2)
        step.offset = f"+{span(step.started - begin)}"
        final = step.kind == "state" and step.ended == step.started
        step.duration = "" if final else span(lasted) + ("" if step.ended else " so far")


def _facts(run: Run, entries: list[LedgerEntry], turns: list[Turn], calls: list[ToolInvocation], now: datetime) -> Any:
    running = timedelta(milliseconds=run.ran_ms) + (now - run.running_since if run.running_since else timedelta())
    whole = (run.finished_at or now) - run.created_at
    queued = (run.started_at or run.finished_at or now) - run.created_at
    return [
        ("Took", span(whole) + ("" if run.finished_at else " so far")),
        ("Queued", span(queued)),
        ("Running", span(running)),
        ("Credits spent", money.to_text(sum(_spent(entry) for entry in entries))),
        ("Credits held", money.to_text(sum(_held(entry) for entry in entries))),
        ("Turns and calls", f"{len(turns)} and {len(calls)}"),
        ("Model", run.resolved_model or run.requested_model or "default"),
        ("Workers lost", str(run.lease_losses)),
    ]


def _spent(entry: LedgerEntry) -> int:
    sign = {EntryType.CAPTURE: 1, EntryType.USAGE: 1, EntryType.REFUND: -1}.get(EntryType[entry.type], 0)
    return sign * entry.amount


def _held(entry: LedgerEntry) -> int:
    return EntryType[entry.type].held * entry.amount


def span(lasted: timedelta) -> str:
    """A duration as text: ``230 ms``, ``4.2 s``, ``3 min 5 s``, ``2 h 4 min``, ``3 d 2 h``."""
    seconds = max(0.0, lasted.total_seconds())
    if seconds < 1:
        return f"{round(seconds * 1000)} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"
