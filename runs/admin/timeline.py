"""The timeline of one run for its page in the admin, by a fixed number of queries, each of at most ROWS_MAX rows. It
has no message, input or result (see ``content_of``).
"""

import json
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Count, Max, Min, Prefetch
from django.utils.html import format_html

from config.kernel import clock
from config.staff.base import amount, span
from credits import statement
from credits.models import EntryType, LedgerEntry
from runs import models
from runs.errors import FailureReason, RunError
from runs.events import StreamType
from runs.models import Run, RunStatus
from webhooks.models import Attempt, Delivery

ROWS_MAX = 200


@dataclass
class Step:
    """One row of the timeline. ``left`` and ``width`` are percentages of the run's duration."""

    kind: str
    title: str
    started: datetime
    ended: datetime | None
    detail: str = ""
    status: str = ""
    tone: str = "default"
    key: str = ""
    charges: list[LedgerEntry] = field(default_factory=list)
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
        return format_html("{} held", amount(held)) if held > 0 else spending(self.charges)


def build(run: Run) -> dict[str, Any]:
    """For the template. ``more``: the kinds of rows of which there are over ROWS_MAX."""
    more: list[str] = []

    def capped(what: str, rows: Any, *order: str) -> list[Any]:
        found = list(rows.order_by(*order)[: ROWS_MAX + 1])
        if len(found) > ROWS_MAX:
            more.append(what)
        return found[:ROWS_MAX]

    calls = models.ToolInvocation.objects.filter(run=run).defer("input", "result", "result_urls", "error_message")
    waitpoints = models.Waitpoint.objects.filter(run=run).defer("request_payload", "resolved_payload")
    rows = LedgerEntry.objects.filter(run_id=run.pk).select_related("account__user", "against", "staff")
    sent = Delivery.objects.filter(run_id=run.pk)
    answered = Prefetch("attempts", Attempt.objects.defer("answer"))
    changes = models.RunEvent.objects.filter(run=run, type=StreamType.RUN_STATUS)
    attempts = models.ModelAttempt.objects.filter(run=run).defer("detail")
    turns = capped("turns", models.Turn.objects.filter(run=run).defer("text", "tool_calls"), "index")
    steps = [_turn(turn) for turn in turns]
    steps += map(_call, capped("tool calls", calls, "turn_index", "call_index"))
    steps += map(_waitpoint, capped("waitpoints", waitpoints, "pk"))
    entries = capped("charges", rows, "created_at", "pk")
    deliveries = capped("webhook deliveries", sent.prefetch_related(answered), "pk")
    steps += _states(run, capped("changes of state", changes, "index"))
    steps += map(_failed_attempt, capped("attempts", attempts, "turn_index", "compaction", "number"))
    steps += map(_compaction, capped("compactions", models.Compaction.objects.filter(run=run).defer("text"), "index"))
    events = models.RunEvent.objects.filter(run=run).order_by().values("type")
    events = events.annotate(count=Count("pk"), first=Min("created_at"), last=Max("created_at"))
    facts = _facts(run, entries, len(turns), sum(step.kind == "call" for step in steps))
    _charge(run, steps, entries)
    steps.sort(key=lambda step: (step.started, step.kind != "state"))
    _draw(run, steps)
    found = {"steps": steps, "charges": _charges(entries), "deliveries": deliveries, "facts": facts, "more": more}
    return found | {"events": events.order_by("first", "type")}


def _charges(entries: list[LedgerEntry]) -> list[tuple[LedgerEntry, str, str]]:
    """(row, its amount, what it says), without the holds and releases that are part of a charge."""
    settled = {entry.against_id for entry in entries if entry.against_id}
    charged = {entry.against_id for entry in entries if entry.is_charge}
    return [
        (entry, statement.signed(statement.effect(entry)), statement.sentence(entry))
        for entry in entries
        if not (entry.type == EntryType.HOLD and entry.pk in settled)
        and not (entry.type == EntryType.RELEASE and entry.against_id in charged)
    ]


def _states(run: Run, recorded: list[models.RunEvent]) -> list[Step]:
    """From the run's stream or, after its pruning, from the run itself."""
    changes = [(str(json.loads(event.data).get("status", "")), event.created_at) for event in recorded]
    if not changes:
        known = (RunStatus.QUEUED, run.created_at), (RunStatus.RUNNING, run.started_at), (run.status, run.finished_at)
        changes = [(status, at) for status, at in known if at]
    ends: list[datetime | None] = [at for _, at in changes[1:]]
    ends.append(None if run.finished_at is None else changes[-1][1])
    return [
        Step("state", status, at, end, status=status, tone=RunStatus.tones()[status])
        for (status, at), end in zip(changes, ends, strict=True)
    ]


def _turn(turn: models.Turn) -> Step:
    detail = f"{turn.model}, {_tokens(turn)}"
    return Step("turn", f"Turn {turn.index}", turn.started_at, turn.finished_at, detail, "", "info", str(turn.index))


def _tokens(step: models.Turn | models.Compaction) -> str:
    cached = f" ({step.cached_tokens:,} of them cached)" if step.cached_tokens else ""
    return f"{step.input_tokens:,} tokens in{cached}, {step.output_tokens:,} out"


def _compaction(step: models.Compaction) -> Step:
    text = f"{step.get_kind_display()}, about {step.tokens_before:,} tokens to {step.tokens_after:,}"
    if step.kind == models.CompactionKind.SUMMARY:
        text += f"; {step.model}, {_tokens(step)}; the summary is among the messages and results"
    text += f"; no summary: {step.failure_reason}" if step.failure_reason else ""
    title, key = f"Compaction {step.index}", step.KEY.format(step.index)
    return Step("compaction", title, step.started_at, step.finished_at, text, "", "info", key)


def _failed_attempt(attempt: models.ModelAttempt) -> Step:
    status = f" (HTTP {attempt.http_status})" if attempt.http_status else ""
    text = f"{attempt.model} at {attempt.provider}: {attempt.reason}{status}"
    if attempt.next_at is not None:
        text += f"; {attempt.next_model} is asked after {span(attempt.next_at - attempt.finished_at)}"
    title = f"{attempt.step}, attempt {attempt.number} failed"
    return Step("attempt", title, attempt.started_at, attempt.finished_at, text, tone="warning")


def _call(call: models.ToolInvocation) -> Step:
    text = f"call {call.turn_index}.{call.call_index}" + (f", {call.error_code}" if call.error_code else "")
    if call.awaiting:
        fraction = (call.progress or {}).get("fraction")
        text += f", awaits {call.get_awaiting_display()} until {call.expires_at:%Y-%m-%d %H:%M} UTC"
        text += f", {fraction:.0%} done" if fraction is not None else ""
    begun, tone = call.started_at or call.created_at, models.InvocationStatus.tones()[call.status]
    return Step("call", call.name, begun, call.finished_at, text, call.status, tone, call.pk)


def _waitpoint(point: models.Waitpoint) -> Step:
    text = "answered" if point.status == models.WaitpointStatus.COMPLETED else ""
    title = point.get_kind_display().capitalize() if point.needed is None else "Waits for credits"
    tone = models.WaitpointStatus.tones()[point.status]
    return Step("waitpoint", title, point.created_at, point.resolved_at, text, point.status, tone)


def _charge(run: Run, steps: list[Step], entries: list[LedgerEntry]) -> None:
    """Attach holds and charges to their call, turn or compaction. New steps: the model request under way, and each
    charged model request that a cancel, a time limit or a lost worker ended early.
    """
    known = {step.key: step for step in steps if step.key}
    settled: defaultdict[str | None, list[LedgerEntry]] = defaultdict(list)
    for entry in entries:
        settled[entry.against_id].append(entry)
    for hold in entries:
        if hold.type != EntryType.HOLD:
            continue
        ends, key = settled[hold.pk], hold.invocation_id or str((hold.price or {}).get("turn", ""))
        usage = next((entry for entry in ends if entry.type == EntryType.USAGE), None)
        step = known.get(key)
        if usage is not None and (usage.price or {}).get("partial"):
            step = _unanswered(key, hold, usage)
            steps.append(step)
        elif step is None and not ends and run.status == RunStatus.RUNNING:
            step = _unanswered(key, hold, None)
            steps.append(step)
        if step is not None and (usage or not ends or hold.invocation_id):
            step.charges += [hold, *ends, *(back for end in ends for back in settled[end.pk])]


def _unanswered(index: str, hold: LedgerEntry, usage: LedgerEntry | None) -> Step:
    title = f"Turn {index}" if index.isdecimal() else "Summary"
    price = (usage or hold).price or {}
    tokens = f"{price.get('inputTokens', 0):,} tokens in, {price.get('outputTokens', 0):,} out"
    model = f"{(hold.price or {}).get('model')}, "
    if usage is None:
        return Step("turn", title, hold.created_at, None, f"{model}at most {tokens}", tone="info")
    text = model + tokens + (", estimated" if price.get("estimated") else "")
    return Step("attempt", f"{title} ended early", hold.created_at, usage.created_at, text, tone="warning")


def _draw(run: Run, steps: list[Step]) -> None:
    begin = run.created_at
    end = max([run.finished_at or clock.now(), *(step.ended for step in steps if step.ended)])
    whole = max((end - begin).total_seconds(), 0.001)
    for step in steps:
        lasted = (step.ended or end) - step.started
        left = min(100.0, max(0.0, (step.started - begin).total_seconds() / whole * 100))
        step.left = round(left, 2)
        step.width = round(min(100.0 - left, max(0.0, lasted.total_seconds() / whole * 100)), 2)
        step.offset = f"+{span(step.started - begin)}"
        final = step.kind == "state" and step.ended == step.started
        step.duration = "" if final else span(lasted) + ("" if step.ended else " so far")


def _facts(run: Run, entries: list[LedgerEntry], turns: int, calls: int) -> list[tuple[str, str]]:
    now = clock.now()
    running = timedelta(milliseconds=run.ran_ms) + (now - run.running_since if run.running_since else timedelta())
    whole = (run.finished_at or now) - run.created_at
    return [
        ("Took", span(whole) + ("" if run.finished_at else " so far")),
        ("Queued", span((run.started_at or run.finished_at or now) - run.created_at)),
        ("Running", span(running)),
        ("Credits spent", spending(entries)),
        ("Credits held", amount(sum(map(_held, entries)))),
        ("Turns and calls", f"{turns} and {calls}"),
        ("Workers lost", str(run.lease_losses)),
    ]


def spending(entries: list[LedgerEntry]) -> str:
    """``12``, or ``12, refunded 12``."""
    charged = sum(entry.amount for entry in entries if entry.is_charge)
    refunded = sum(entry.amount for entry in entries if entry.type == EntryType.REFUND)
    return format_html("{}, refunded {}", amount(charged), amount(refunded)) if refunded else amount(charged)


def _held(entry: LedgerEntry) -> int:
    return EntryType[entry.type].held * entry.amount


def reasons(run: Run) -> list[Any]:
    """Why the run failed, the cause last; without codes that this version does not know."""
    return [code for code in (*RunError, *FailureReason) if code in (run.error_code, run.failure_reason)]
