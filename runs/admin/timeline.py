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
from config.staff.words import span
from credits import statement
from credits.models import EntryType, LedgerEntry
from runs.events import StreamType
from runs.lifecycle import compaction_key
from runs.models import (
    Compaction,
    CompactionKind,
    InvocationStatus,
    ModelAttempt,
    Run,
    RunEvent,
    RunStatus,
    ToolInvocation,
    Turn,
    Waitpoint,
    WaitpointStatus,
)
from webhooks.events import Event
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
        # A turn's hold is not among its charges, only what settles it.
        if held > 0:
            return f"{money.to_text(held)} held"
        return money.to_text(sum(_spent(entry) for entry in self.charges))

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

    @property
    def charges(self) -> list[tuple[LedgerEntry, str, str]]:
        """(row, its amount, what it says) without the holds and releases that are part of a charge."""
        settled = {entry.against_id for entry in self.entries if entry.against_id}
        charged = {entry.against_id for entry in self.entries if entry.type in statement.CHARGES}
        return [
            (entry, statement.signed(statement.effect(entry)), statement.sentence(entry))
            for entry in self.entries
            if not (entry.type == EntryType.HOLD and entry.pk in settled)
            and not (entry.type == EntryType.RELEASE and entry.against_id in charged)
        ]


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
    rows = LedgerEntry.objects.filter(run_id=run.pk).select_related("account__user", "against", "staff")
    entries = capped(rows.order_by("created_at", "pk"), "charges")
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
    failed = capped(
        ModelAttempt.objects.filter(run=run).defer("detail").order_by("turn_index", "compaction", "number"), "attempts"
    )
    shortened = capped(Compaction.objects.filter(run=run).defer("text").order_by("index"), "compactions")
    steps = [
        *_states(run, states),
        *_turns(turns),
        *_compactions(shortened),
        *_failed_attempts(failed),
        *_calls(calls),
        *_waitpoints(waitpoints),
    ]
    steps += _charge_turns(run, steps, entries)
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
            f"{turn.model}, {_tokens(turn)}",
            tone="info",
            key=str(turn.index),
        )
        for turn in turns
    ]


def _tokens(step: Turn | Compaction) -> str:
    cached = f" ({step.cached_tokens:,} of them cached)" if step.cached_tokens else ""
    return f"{step.input_tokens:,} tokens in{cached}, {step.output_tokens:,} out"


def _compactions(compactions: list[Compaction]) -> list[Step]:
    return [
        Step(
            "compaction",
            "compress",
            f"Compaction {compaction.index}",
            compaction.started_at,
            compaction.finished_at,
            _what_was_shortened(compaction),
            tone="info",
            key=compaction_key(compaction.index),
        )
        for compaction in compactions
    ]


def _what_was_shortened(compaction: Compaction) -> str:
    text = f"{compaction.get_kind_display()}, about {compaction.tokens_before:,} tokens to {compaction.tokens_after:,}"
    if compaction.kind == CompactionKind.SUMMARY:
        text += f"; {compaction.model}, {_tokens(compaction)}; the summary is among the messages and results"
    return text + (f"; no summary: {compaction.failure_reason}" if compaction.failure_reason else "")


def _failed_attempts(attempts: list[ModelAttempt]) -> list[Step]:
    return [
        Step(
            "attempt",
            "sync_problem",
            f"{attempt.step}, attempt {attempt.number} failed",
            attempt.started_at,
            attempt.finished_at,
            _what_failed(attempt),
            tone="warning",
        )
        for attempt in attempts
    ]


def _what_failed(attempt: ModelAttempt) -> str:
    status = f" (HTTP {attempt.http_status})" if attempt.http_status else ""
    text = f"{attempt.model} at {attempt.provider}: {attempt.reason}{status}"
    if attempt.next_at is None:
        return text
    return f"{text}; {attempt.next_model} is asked after {span(attempt.next_at - attempt.finished_at)}"


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


def _charge_turns(run: Run, steps: list[Step], entries: list[LedgerEntry]) -> list[Step]:
    """Attach what was held and charged for each request to a model to its turn or failed attempt. Returns steps for the
    requests that have neither: the one under way, and those that a cancel, a time limit or a lost worker ended.
    """
    turns = {step.key: step for step in steps if step.kind in ("turn", "compaction")}
    attempts = [step for step in steps if step.kind == "attempt"]
    settled: defaultdict[str | None, list[LedgerEntry]] = defaultdict(list)
    for entry in entries:
        settled[entry.against_id].append(entry)
    more: list[Step] = []
    for hold in entries:
        if hold.type != EntryType.HOLD or hold.invocation_id is not None:
            continue
        ends, price = settled[hold.pk], hold.price or {}
        usage = next((entry for entry in ends if entry.type == EntryType.USAGE), None)
        index = str(price.get("turn", ""))
        is_whole = usage is not None and not (usage.price or {}).get("partial")
        failed = (a for a in attempts if a.ended and a.started <= hold.created_at <= a.ended)
        step = turns.get(index) if is_whole else next(failed, None)
        if step is None and ends:
            detail = f"{price.get('model')}, {_counts(usage)}" if usage else "it costs nothing: no answer had begun"
            title = f"{_step(index)} ended early"
            step = Step("turn", "sync_problem", title, hold.created_at, ends[0].created_at, detail, tone="warning")
            more.append(step)
        elif step is None and run.status == RunStatus.RUNNING and index not in turns:
            most = f"{price.get('model')}, at most {price.get('inputTokens', 0):,} tokens in"
            detail = f"{most}, {price.get('outputTokens', 0):,} out"
            step = Step("turn", "sync", _step(index), hold.created_at, None, detail, tone="info")
            more.append(step)
        if step is not None and ends:
            step.charges += [hold, *ends]
        elif step in more:
            step.charges.append(hold)
    return more


def _step(index: str) -> str:
    return f"Turn {index}" if index.isdecimal() else "Summary"


def _counts(usage: LedgerEntry) -> str:
    price = usage.price or {}
    how = ", estimated" if price.get("estimated") else ""
    return f"{price.get('inputTokens', 0):,} tokens in, {price.get('outputTokens', 0):,} out{how}"


def _attach(steps: list[Step], entries: list[LedgerEntry], deliveries: list[Delivery]) -> None:
    """Attach each charge of a call and each delivery to the step that caused it."""
    calls = {step.key: step for step in steps if step.kind == "call"}
    for entry in entries:
        if step := calls.get(entry.invocation_id or ""):
            step.charges.append(entry)
    states: defaultdict[str, list[Step]] = defaultdict(list)
    for step in steps:
        if step.kind == "state":
            states[step.status].append(step)
    reported: dict[str, Step] = {}
    for delivery in deliveries:
        call_id = _body(delivery).get("toolInvocationId")
        if call_id in calls:
            calls[call_id].deliveries.append(delivery)
        elif queue := states[_run_status(delivery)]:
            # Both are in the order of time; the last step takes the remaining deliveries. The deliveries of one event
            # to two endpoints belong to one step.
            step = reported.get(delivery.event_id) or (queue.pop(0) if len(queue) > 1 else queue[0])
            reported[delivery.event_id] = step
            step.deliveries.append(delivery)


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
        ("Agent", run.agent or "–"),
        ("Model", run.resolved_model or run.requested_model or "default"),
        ("Workers lost", str(run.lease_losses)),
    ]


def _spent(entry: LedgerEntry) -> int:
    sign = {EntryType.CAPTURE: 1, EntryType.USAGE: 1, EntryType.REFUND: -1}.get(EntryType[entry.type], 0)
    return sign * entry.amount


def _held(entry: LedgerEntry) -> int:
    return EntryType[entry.type].held * entry.amount
