"""Invariants: what must be true of the database at every moment, after any crash, loss or repetition. Reads only.

Each rule is one statement over whole tables and reports at most MOST rows. So it works with a million runs and beside a
running service: a statement sees one moment, and ``_grace`` leaves the sweeps time to repair. What the constraints of
the tables enforce is not checked here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from itertools import islice, product
from typing import Any

from django.conf import settings
from django.db import connection
from django.db.models import (
    BigIntegerField,
    Case,
    Count,
    Exists,
    F,
    JSONField,
    Max,
    Min,
    Model,
    OuterRef,
    Q,
    QuerySet,
    Subquery,
    Sum,
    Value,
    When,
)
from django.db.models.fields.json import KeyTextTransform
from django.db.models.functions import Cast, Coalesce

from chats.models import Chat
from config.kernel import clock
from credits import reconcile, sums
from credits.models import SETTLEMENTS, Account, EntryType, LedgerEntry
from runs.events import StreamType
from runs.lifecycle import line
from runs.models import (
    FINAL_INVOCATION_STATUSES,
    FINAL_RUN_STATUSES,
    LIVE_RUN_STATUSES,
    Awaiting,
    Compaction,
    InvocationStatus,
    Run,
    RunEvent,
    RunStatus,
    ToolInvocation,
    Turn,
    Waitpoint,
    WaitpointStatus,
    Worker,
)
from webhooks.events import Event
from webhooks.models import Delivery, Endpoint

MOST = 20
# An event recorded at the moment when its endpoint was switched may have a delivery or not.
ENDPOINT_MARGIN = timedelta(seconds=1)

FINAL = Q(status__in=FINAL_RUN_STATUSES)


def violations(report: Callable[[str, int, int], object] = lambda *step: None, *, workers: bool = True) -> list[str]:
    """One line for each violation, at most MOST for a rule. ``report`` gets the progress (step, its number, total),
    because large tables take minutes. Without ``workers``, as in the copy of a backup, nobody takes runs over.
    """
    rules: dict[str, Callable[[], Iterator[str]]] = {
        "states": _states,
        **({"takeovers": _takeovers} if workers else {}),
        "chats": _chats,
        "streams": _streams,
        "ends": _ends,
        "calls": _calls,
        "outcomes": _outcomes,
        "charges": _charges,
        "deliveries": _deliveries,
        "accounts": reconcile.drift,
    }
    found: list[str] = []
    for number, (name, rule) in enumerate(rules.items(), 1):
        report(name, number, len(rules))
        lines = list(islice(rule(), MOST + 1))
        found += lines[:MOST]
        if len(lines) > MOST:
            found.append(f"… and more of this kind: {lines[MOST]}")
    return found


def _each(*rules: tuple[Any, ...]) -> Iterator[str]:
    """Rules are (rows, text[, columns]). A line for each row: the first column, and the text with the other ones."""
    for rows, text, *columns in rules:
        for key, *values in rows.order_by().values_list(*(columns or ["pk"]))[: MOST + 1]:
            yield f"{key}: {text.format(*values)}"


def _grace() -> datetime:
    """The sweeps should have handled workers and runs that are older than this."""
    return clock.now() - timedelta(seconds=5 * (settings.RUN_LEASE_SECONDS + settings.RUN_SWEEP_SECONDS))


def _with_events() -> QuerySet[Run]:
    """The runs whose stream was not pruned. A prune deletes all events of a run that ended at least a day ago, the
    shortest RUN_EVENT_RETENTION_DAYS. The setting may have changed since.
    """
    events = Exists(RunEvent.objects.filter(run=OuterRef("pk")))
    return Run.objects.exclude(~events, FINAL, finished_at__lt=clock.now() - timedelta(days=1))


def _states() -> Iterator[str]:
    asked = Exists(Waitpoint.objects.filter(run=OuterRef("pk"), status=WaitpointStatus.PENDING))
    open_call = Exists(ToolInvocation.objects.filter(run=OuterRef("pk")).exclude(status__in=FINAL_INVOCATION_STATUSES))
    runs, claimable = Run.objects.all(), Q(status=RunStatus.QUEUED, blocked=False, throttled=False)
    claimable |= Q(status=RunStatus.RUNNING, worker_id=None, parked=False)
    waiting, cancelled = runs.filter(status=RunStatus.WAITING), Q(cancel_requested_at__isnull=False)
    owned = runs.filter(worker_id__isnull=False)
    yield from _each(
        (runs.exclude(status__in=RunStatus.values), "the run has an unknown status"),
        (waiting.filter(~asked), "the run waits, but no waitpoint is open"),
        (runs.filter(asked).exclude(status=RunStatus.WAITING), "a waitpoint is open, but the run does not wait"),
        (waiting.filter(cancelled), "the run waits, but its end was requested"),
        (runs.filter(FINAL & open_call), "the run has ended, but a tool call of it has not"),
        (runs.filter(FINAL, finished_at=None), "the run has ended, but has no finishedAt"),
        (runs.exclude(FINAL).exclude(finished_at=None), "the run has a finishedAt, but has not ended"),
        (owned.exclude(status=RunStatus.RUNNING), "a worker owns a run that is not running"),
        (
            runs.filter(throttled=True, parked=False).exclude(status=RunStatus.QUEUED),
            "a run waits for room, but is not queued",
        ),
        (runs.filter(claimable, due_at=None), "the run could execute, but no sweep will find it"),
    )
    yield from _parked()


def _parked() -> Iterator[str]:
    """Who awaits an outcome: the calls of a parked run, until the run is due, and no run that has ended."""
    awaiting = ToolInvocation.objects.filter(awaiting__isnull=False)
    of_run = awaiting.filter(run=OuterRef("pk"))
    at_work = ToolInvocation.objects.filter(run=OuterRef("pk"), awaiting=None)
    at_work = at_work.exclude(status__in=FINAL_INVOCATION_STATUSES)
    waits = Run.objects.filter(parked=True, due_at=None, throttled=False)
    settled = LedgerEntry.objects.filter(against=OuterRef("pk"), type__in=SETTLEMENTS)
    of_call = {"run_id": OuterRef("run_id"), "invocation_id": OuterRef("pk")}
    holds = LedgerEntry.objects.filter(~Exists(settled), **of_call, type=EntryType.HOLD)
    shown = Run.objects.annotate(
        client=Exists(of_run.filter(awaiting=Awaiting.CLIENT)), tool=Exists(of_run.filter(awaiting=Awaiting.TOOL))
    ).annotate(right=Case(When(client=True, then=Value("client")), When(tool=True, then=Value("tool"))))
    wrong = shown.exclude(Q(awaiting=F("right")) | Q(awaiting=None, right=None))
    yield from _each(
        (waits.filter(~Exists(of_run)), "the run is parked, but no call of it awaits an outcome"),
        (waits.filter(Exists(at_work)), "the run is parked, but a call of it awaits nobody"),
        (wrong, "the run's awaiting is not that of its open calls"),
        (awaiting.exclude(status=InvocationStatus.DISPATCHING), "the call awaits an outcome, but is not open"),
        (awaiting.filter(expires_at=None), "the call awaits an outcome, but has no expiresAt"),
        (awaiting.filter(~Exists(holds), credit_estimate__gt=0), "the call awaits an outcome, but has no open hold"),
    )


def _takeovers() -> Iterator[str]:
    long_since = _grace()
    runs = Run.objects.filter(status=RunStatus.RUNNING, updated_at__lt=long_since)
    alive = Exists(Worker.objects.filter(pk=OuterRef("worker_id"), expires_at__gte=long_since))
    gone = runs.filter(~alive, worker_id__isnull=False)
    worn = runs.filter(worker_id=None, lease_losses__gte=line.RUN_LEASE_LOSSES_MAX)
    yield from _each(
        (gone, "the run's worker is long gone, but no worker took the run over"),
        (worn, "the run lost its worker too often, but was not given up"),
    )


def _chats() -> Iterator[str]:
    live = Run.objects.filter(status__in=LIVE_RUN_STATUSES)
    ahead = live.filter(blocked=False)
    active = Exists(ahead.filter(pk=OuterRef("active_run_id"), chat_id=OuterRef("pk")))
    chat_of = Exists(Chat.objects.filter(pk=OuterRef("chat_id"), active_run_id=OuterRef("pk")))
    in_chat = Exists(ahead.filter(chat_id=OuterRef("chat_id")))
    chats = Chat.objects.filter(~active, active_run_id__isnull=False)
    yield from _each(
        (chats, "the chat's active run is not one of its live runs"),
        (ahead.filter(~chat_of), "the run is live and not in line, but not its chat's active one"),
        (Run.objects.filter(~in_chat, blocked=True), "the run is in line behind no live run"),
    )


def _streams() -> Iterator[str]:
    """Indexes go from 1 to lastStreamIndex without a gap; a constraint keeps them unique."""
    streams = _with_events().annotate(
        count=Count("events"), first=Coalesce(Min("events__index"), 1), last=Coalesce(Max("events__index"), 0)
    )
    broken = streams.filter(~Q(count=F("last_stream_index")) | ~Q(last=F("last_stream_index")) | ~Q(first=1))
    text = "the stream has {} events, but its last index is {}, or there is a gap"
    yield from _each((broken, text, "pk", "count", "last_stream_index"))


def _ends() -> Iterator[str]:
    """Exactly the last event of a run that has ended is final, and it has the run's status."""
    early = RunEvent.objects.filter(final=True).exclude(
        run__status__in=FINAL_RUN_STATUSES, index=F("run__last_stream_index")
    )
    yield from _each((early, "an event is final, but the run has not ended with it", "run_id"))
    for status in RunStatus.values:
        last = RunEvent.objects.filter(
            run=OuterRef("pk"),
            index=OuterRef("last_stream_index"),
            type=StreamType.RUN_STATUS,
            final=status in FINAL_RUN_STATUSES,
            data__contains=f'"status":"{status}"',
        )
        if status in FINAL_RUN_STATUSES:
            ended = _with_events().filter(~Exists(last), status=status)
            yield from _each((ended, f"the run is {status}, but its stream does not end so"))
        earlier = Run.objects.filter(Exists(last)).exclude(status=status)
        yield from _each((earlier, f"the stream's last status is {status}, but the run is not"))


def _calls() -> Iterator[str]:
    """Each recorded call has one result event, and no event of the call follows it."""
    calls = (
        RunEvent.objects.filter(type__in=[StreamType.TOOL_STARTED, StreamType.TOOL_COMPLETED])
        .annotate(call=KeyTextTransform("toolInvocationId", Cast("data", JSONField())))
        .order_by()
        .values("call")
        .annotate(
            started=Count("pk", filter=Q(type=StreamType.TOOL_STARTED)),
            last_started=Max("index", filter=Q(type=StreamType.TOOL_STARTED)),
            completed=Count("pk", filter=Q(type=StreamType.TOOL_COMPLETED)),
            first_completed=Min("index", filter=Q(type=StreamType.TOOL_COMPLETED)),
        )
    )
    wrong = calls.filter(Q(started__gt=1) | Q(completed__gt=1) | Q(last_started__gt=F("first_completed")))
    ended = ToolInvocation.objects.filter(run=OuterRef("pk"), status__in=FINAL_INVOCATION_STATUSES)
    events = RunEvent.objects.filter(run=OuterRef("pk"), type=StreamType.TOOL_COMPLETED)
    unequal = _with_events().annotate(ended=_count(ended, "run"), results=_count(events, "run"))
    unequal = unequal.exclude(ended=F("results"))
    calls_of_run = _count(ToolInvocation.objects.filter(run=OuterRef("pk")), "run")
    miscounted = Run.objects.exclude(tool_invocation_count=calls_of_run)
    once = "the call was started or completed more than once, or started after its result"
    yield from _each(
        (wrong, once, "call"),
        (unequal, "{} calls have ended, {} have a result event", "pk", "ended", "results"),
        (miscounted, "the run's toolInvocationCount is not its number of calls"),
    )


def _outcomes() -> Iterator[str]:
    """At most one delivery to an endpoint reports the end of a run, with its status, and one the end of a call."""
    ending = [event for event in Event if event.stream_status in FINAL_RUN_STATUSES]
    ends = Delivery.objects.filter(event_type__in=ending).order_by()
    twice = ends.values("run_id", "endpoint_id").annotate(times=Count("pk")).filter(times__gt=1)
    yield from _each((twice, "more than one webhook event reports the run's end", "run_id"))
    for event in ending:
        reported = Delivery.objects.filter(event_type=event).values("run_id")
        wrong = Run.objects.filter(pk__in=reported).exclude(status=event.stream_status)
        yield from _each((wrong, f"a webhook says {event}, but the run is not"))
    calls = Delivery.objects.filter(event_type=Event.TOOL_COMPLETED).annotate(
        call=KeyTextTransform("toolInvocationId", Cast("body", JSONField()))
    )
    repeated = calls.order_by().values("call", "endpoint_id").annotate(times=Count("pk")).filter(times__gt=1)
    yield from _each((repeated, "more than one webhook event reports the call's end", "call"))


def _charges() -> Iterator[str]:
    """Charges agree with the work done. ``reconcile`` compares accounts with the ledger."""
    ended = Run.objects.filter(FINAL, pk=OuterRef("run_id"))
    settled = LedgerEntry.objects.filter(against=OuterRef("pk"), type__in=SETTLEMENTS)
    unsettled = LedgerEntry.objects.filter(~Exists(settled), Exists(ended), type=EntryType.HOLD)
    captures = LedgerEntry.objects.filter(type=EntryType.CAPTURE).order_by()
    twice = captures.values("invocation_id").annotate(times=Count("pk")).filter(times__gt=1)
    # By run first: the ledger has an index on it.
    captured = captures.filter(run_id=OuterRef("run_id"), invocation_id=OuterRef("pk"))
    calls = ToolInvocation.objects.annotate(captured=_sum(captured, "invocation_id", "amount"))
    completed = Q(status=InvocationStatus.COMPLETED)
    wrong = calls.filter((completed & ~Q(captured=F("credit_used"))) | (~completed & ~Q(captured=0)))
    used = LedgerEntry.objects.filter(run_id=OuterRef("pk"), type=EntryType.USAGE).exclude(price__has_key="partial")
    turns = Turn.objects.filter(run=OuterRef("pk"))
    compactions = Compaction.objects.filter(run=OuterRef("pk"))
    charged = Run.objects.annotate(
        turns_recorded=_count(turns, "run"),
        requests_held=_count(turns.filter(held__gt=0), "run") + _count(compactions.filter(held__gt=0), "run"),
        tokens_recorded=_sum(turns, "run", "input_tokens") + _sum(compactions, "run", "input_tokens"),
        usage_count=_count(used, "run_id"),
        cost=_sum(turns, "run", "cost") + _sum(compactions, "run", "cost"),
        usage_cost=_sum(used, "run_id", "amount"),
    )
    unequal = charged.filter(~Q(requests_held=F("usage_count")) | ~Q(cost=F("usage_cost")))
    # Turns that ended early are part of the usage, but have no rows of their own.
    less = charged.filter(Q(turns_recorded__gt=F("turn_count")) | Q(tokens_recorded__gt=F("input_tokens")))
    spent = Run.objects.filter(max_credits__isnull=False).annotate(spent=sums.run_spent_subquery())
    staff = LedgerEntry.objects.filter(account_id=OuterRef("pk"), type=EntryType.ADJUSTMENT, amount__lt=0)
    below = Account.objects.filter(balance__lt=F("held")).exclude(Exists(staff))
    yield from _each(
        (unsettled, "the hold is open, but its run has ended"),
        (twice, "the call was charged more than once", "invocation_id"),
        (wrong, "the call's creditUsed is not what it was charged"),
        (unequal, "the run's turns are not what it was charged for"),
        (less, "the run's usage is less than that of its turns"),
        (spent.filter(spent__gt=F("max_credits")), "the run spent more than its maxCredits"),
        (below, "the available credits are below zero without an adjustment by staff"),
    )


# Deliveries have no index by run, so both sides are counted as a whole and joined.
_UNEQUAL = """
    SELECT run.*, endpoint.id AS endpoint_id, COALESCE(happened.times, 0) AS happened, COALESCE(sent.times, 0) AS sent
    FROM runs_run run
    JOIN webhooks_endpoint endpoint
      ON {whose} AND endpoint.enabled AND endpoint.deleted_at IS NULL AND (endpoint.extended_events OR %s)
    LEFT JOIN (
        SELECT run_id, count(*) AS times FROM runs_runevent WHERE type = %s AND data LIKE %s GROUP BY run_id
    ) happened ON happened.run_id = run.id
    LEFT JOIN (
        SELECT run_id, endpoint_id, count(*) AS times FROM webhooks_delivery WHERE event_type = %s
        GROUP BY run_id, endpoint_id
    ) sent ON sent.run_id = run.id AND sent.endpoint_id = endpoint.id
    WHERE run.created_at > endpoint.updated_at AND run.created_at > %s
      AND COALESCE(happened.times, 0) <> COALESCE(sent.times, 0)
"""
# The user's endpoint and the installation endpoint. One condition for both would compare every run with every endpoint.
_WHOSE = ("endpoint.user_id = run.user_id", "endpoint.user_id IS NULL")


def _deliveries() -> Iterator[str]:
    """Each reported change has its delivery. Runs that began before the last change of the endpoint are left out."""
    kept_since = connection.ops.adapt_datetimefield_value(clock.now() - timedelta(days=settings.WEBHOOK_RETENTION_DAYS))
    for event, whose in product(Event, _WHOSE):
        status = f'%"status":"{event.stream_status}"%' if event.stream_status else "%"
        parameters = [not event.extended, event.stream_type, status, event, kept_since]
        found: Iterator[Any] = Run.objects.raw(_UNEQUAL.format(whose=whose), parameters).iterator()
        for run in found:
            if (
                _with_events().filter(pk=run.pk).exists()
                and Endpoint.objects.filter(
                    pk=run.endpoint_id, deleted_at=None, updated_at__lt=run.created_at - ENDPOINT_MARGIN
                ).exists()
            ):
                yield f"{run.pk}: {event} happened {run.happened} times, but has {run.sent} deliveries"


def _count(rows: QuerySet[Model], by: str) -> Coalesce:
    counted = rows.order_by().values(by).annotate(total=Count("pk")).values("total")
    return Coalesce(Subquery(counted), 0)


def _sum(rows: QuerySet[Model], by: str, column: str) -> Cast:
    summed = rows.order_by().values(by).annotate(total=Sum(column)).values("total")
    return Cast(Coalesce(Subquery(summed), Value(0)), BigIntegerField())
