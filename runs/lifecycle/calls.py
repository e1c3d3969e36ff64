"""Every transition of a tool call; ``moves`` has the rules. Some calls get their outcome without a worker: from the
tool's callback, or from the caller's app (docs/architecture.md, "Parked calls"). Such an outcome needs no lease: its
transaction locks the run. A worker that owns the run finds the run's stream ahead and reads the run again.
"""

from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models import QuerySet, Window
from django.db.models.functions import RowNumber

from config.kernel import clock
from config.kernel.errors import NotFound
from credits import ledger
from runs import events
from runs.errors import CallError
from runs.events import StreamEvent
from runs.lifecycle import spending
from runs.lifecycle.crash import crash_after_commit
from runs.lifecycle.line import NUDGE_GRACE, lock_user
from runs.lifecycle.moves import WIDE, Moved, changed, fence, lock_run, move_call, move_row, move_run
from runs.models import Awaiting, InvocationStatus, Run, RunStatus, ToolInvocation, Waitpoint, WaitpointStatus
from runs.tools.base import CLIENT, PROGRESS_MAX_CHARS, Parked, ToolFailure, ToolResult, clean_text, shorten, tool_error
from runs.tools.questions import Dialogue

# The columns of awaiting, as an ended call has them.
NOT_AWAITING: dict[str, Any] = dict.fromkeys(("awaiting", "expires_at", "progress", "contact_at")) | {"remote_task": ""}
TOO_MANY_PARKED = "Too many calls of the user await their outcome."
PROGRESS_SECONDS = 1  # At most one progress report of a call is kept in this many seconds.
TELL_AGAIN_SECONDS = (30, 60)  # pauses between the attempts to tell a tool's server about the end of a call
# The longest time of a request about an open call; after it, another worker makes the request again.
CONTACT_SECONDS = 60


def reject_new_call(call: ToolInvocation, failure: ToolFailure) -> ToolInvocation:
    """(new) → FAILED: a call that cannot be made. It is not stored yet."""
    ended = end_of(call, failure)
    return changed(call, started_at=ended["finished_at"], **ended)


@transaction.atomic
def dispatch_calls(run: Run, calls: Sequence[ToolInvocation], approved: Container[str] = ()) -> Moved:
    """``dispatch`` by the run's owner. ``approved`` calls usually have had their holds since the approval."""
    fence_to_dispatch(run, calls)
    moved = [move_call(call, **changes) if changes else call for call, changes in dispatch(run, calls, approved)]
    changes = awaiting([run.awaiting, *(call.awaiting for call in moved)])
    return Moved(move_run(run, RunStatus.RUNNING, list(dispatch_events(moved)), **changes), moved)


def fence_to_dispatch(run: Run, calls: Iterable[ToolInvocation]) -> None:
    """``fence``, so that dispatches of the run's calls see what the others hold of its budget. If a call is for the
    caller's app, the user is locked, too, because such calls are counted over all runs of the user.
    """
    if any(call.node_type == CLIENT for call in calls):
        lock_user(run.pk)
    fence(run)


def awaiting(kinds: Iterable[str | None]) -> dict[str, Any]:
    """The change of the run's row for open calls that await outcomes of these kinds: ``client`` before ``tool``."""
    return {"awaiting": min(filter(None, kinds), default=None)}


def room_to_park(user_id: int) -> int:
    """How many calls of the user may still begin to await their outcome (PARKED_CALLS_PER_USER)."""
    calls = ToolInvocation.objects.filter(run__user_id=user_id, run__awaiting__isnull=False, awaiting__isnull=False)
    return settings.PARKED_CALLS_PER_USER - calls.count()


def dispatch(
    run: Run, calls: Sequence[ToolInvocation], approved: Container[str] = ()
) -> Iterator[tuple[ToolInvocation, dict[str, Any]]]:
    """PENDING → DISPATCHING with the hold placed, or → FAILED if credits or budget are not enough. No changes mean
    that the call, or its run, must wait for credits. A call whose outcome could not be awaited is not dispatched.
    Yields each call with its changes; the caller, who has fenced the run, writes them.
    """
    awaits = {call.id for call in calls if call.node_type == CLIENT or call.park_seconds is not None}
    room = room_to_park(run.user_id) if awaits else 0
    # Calls for the caller's app come last, so that a client can show them apart from the others.
    for call in sorted(calls, key=lambda call: call.node_type == CLIENT):
        held = ledger.hold_of(call.id) if call.id in approved else None
        try:
            if call.id in awaits and room <= 0:
                raise tool_error(TOO_MANY_PARKED)
            if not (held or call.node_type == CLIENT or spending.hold_call(run, call)):
                yield call, {}
                continue
        except ToolFailure as failure:
            if held:
                ledger.settle(held, 0)
            yield call, end_of(call, failure)
            continue
        room -= call.id in awaits
        changes: dict[str, Any] = {"status": InvocationStatus.DISPATCHING, "started_at": clock.now()}
        if call.node_type == CLIENT:  # the caller's app is awaited at once
            expires_at = changes["started_at"] + timedelta(seconds=settings.CLIENT_CALL_SECONDS)
            changes |= {"awaiting": Awaiting.CLIENT.value, "expires_at": expires_at}
        yield call, changes


def dispatch_events(calls: Iterable[ToolInvocation]) -> Iterator[StreamEvent]:
    """The events of calls that were dispatched, or that failed instead."""
    for call in calls:
        if call.status == InvocationStatus.DISPATCHING:
            yield events.tool_started(call)
            if call.awaiting:
                yield events.tool_parked(call)
        elif call.status != InvocationStatus.PENDING:
            yield events.tool_completed(call)


def end_of(call: ToolInvocation, outcome: ToolResult | ToolFailure) -> dict[str, Any]:
    """The changes of the call by its outcome: COMPLETED or FAILED. The call costs its estimate at most."""
    ended: dict[str, Any] = {"finished_at": clock.now()}
    if isinstance(outcome, ToolFailure):
        failed = {"error_code": outcome.code, "error_message": outcome.message}
        return ended | {"status": InvocationStatus.FAILED} | failed
    price = call.credit_estimate
    used = price if outcome.credit_used is None else min(outcome.credit_used, price)
    result = {"result": outcome.text, "result_urls": list(outcome.urls), "credit_used": used}
    return ended | {"status": InvocationStatus.COMPLETED} | result


@transaction.atomic
def record_call_result(run: Run, call: ToolInvocation, outcome: ToolResult | ToolFailure, **told: Any) -> Moved:
    """DISPATCHING (or PENDING) → COMPLETED or FAILED by the run's owner: the model receives the result or the error."""
    columns = end_of(call, outcome) | {"remote_task": ""} | told
    happened = [events.tool_completed(changed(call, **columns))]
    run = move_run(run, RunStatus.RUNNING, happened)
    ended = move_call(call, **columns)
    ledger.capture(ended.id, ended.credit_used)
    return Moved(run, [ended])


@transaction.atomic
def keep_dialogue(run: Run, call: ToolInvocation, remote_task: str) -> Moved:
    """Store a question of the server of an open call to the user; or, before the call is made again with the answers,
    that it is made again. If this worker is lost then, the outcome is as unknown as that of any call.
    """
    run = move_run(run, RunStatus.RUNNING, ())
    return Moved(run, [move_call(call, remote_task=remote_task)])


def close_open(run: Run, reason: str) -> list[StreamEvent]:
    """Close what an ending run leaves open: waitpoints → EXPIRED, PENDING calls → CANCELLED, other calls → FAILED."""
    happened = close_questions(run=run)
    for call in ToolInvocation.open_of(run):
        if call.status == InvocationStatus.PENDING:
            ended: dict[str, Any] = {"status": InvocationStatus.CANCELLED, "finished_at": clock.now()}
        else:
            failure = ToolFailure(CallError.OUTCOME_UNKNOWN, "The run ended while the tool was at work.")
            ended = end_of(call, failure) | NOT_AWAITING | to_tell(call, reason)
        happened.append(events.tool_completed(move_call(call, **ended)))
    return happened


def close_questions(**of: Any) -> list[StreamEvent]:
    """PENDING → EXPIRED for the waitpoints of a run or a call that has ended. The caller has locked the run."""
    waitpoints = Waitpoint.objects.filter(**of, status=WaitpointStatus.PENDING)
    ended = {"status": WaitpointStatus.EXPIRED, "resolved_at": clock.now()}
    return [events.waitpoint_moved(move_row(waitpoint, **ended)) for waitpoint in waitpoints]


def to_tell(call: ToolInvocation, reason: str) -> dict[str, Any]:
    """The changes of a call that ends without an outcome of its tool. The tool's server is told so soon after."""
    if call.park_seconds is None:
        return {}
    return {"contact_at": clock.now(), "contacts": 0, "end_reason": reason, "remote_task": call.remote_task}


@transaction.atomic
def park_call(run: Run, call: ToolInvocation, parked: Parked) -> Moved:
    """The DISPATCHING call now awaits its tool; or → FAILED if the user has PARKED_CALLS_PER_USER such calls."""
    lock_user(run.pk)  # so that calls of other runs are counted
    fence(run)
    if room_to_park(run.user_id) <= 0:
        told = to_tell(call, "run_ended") | {"remote_task": parked.remote_task}
        return record_call_result(run, call, tool_error(TOO_MANY_PARKED), **told)
    now = clock.now()
    # The end that the call's request named beside the callback's address.
    changes: dict[str, Any] = {"awaiting": Awaiting.TOOL.value, "expires_at": call.latest_end}
    if parked.contact_in_seconds is not None:
        contact_at = now + timedelta(seconds=parked.contact_in_seconds)
        changes |= {"contact_at": contact_at, "remote_task": parked.remote_task}
        # The time of a task begins only now: there may have been a question before.
        changes["expires_at"] = now + timedelta(seconds=call.park_seconds or 0)
    if parked.expires_in_seconds is not None:
        changes["expires_at"] = min(changes["expires_at"], now + timedelta(seconds=parked.expires_in_seconds))
    if parked.message:
        changes["progress"] = _progress(now, None, parked.message)
    call = move_call(call, **changes)
    happened = [events.tool_parked(call)] + ([events.tool_progress(call)] if parked.message else [])
    run = move_run(run, RunStatus.RUNNING, happened, awaiting=run.awaiting or Awaiting.TOOL.value)
    crash_after_commit("call_parked")
    return Moved(run, [call])


@transaction.atomic
def record_outcome(call: ToolInvocation, said: ToolResult | ToolFailure | Parked) -> tuple[ToolInvocation, bool]:
    """DISPATCHING → COMPLETED or FAILED, for a call that awaits its outcome or may begin to, in any state of the run.
    Or the progress of an open call, at most once in PROGRESS_SECONDS. Only the first outcome in time counts. Returns
    the call as it then is, and whether this was recorded.
    """
    run, call = _locked(call)
    if isinstance(said, Parked):
        return _record_progress(run, call, said)
    if call.status != InvocationStatus.DISPATCHING or (call.awaiting is None and call.park_seconds is None):
        return call, False
    if call.expires_at is not None and call.expires_at <= clock.now():
        return _expire(run, call), False
    return _end(run, call, said), True


def _record_progress(run: Run, call: ToolInvocation, said: Parked) -> tuple[ToolInvocation, bool]:
    now = clock.now()
    # Each progress report adds an event, so that an owner of the run must read the run again.
    disturbs = run.worker_id is not None and now - run.updated_at < timedelta(seconds=PROGRESS_SECONDS)
    last = (call.progress or {}).get("at")
    is_early = last is not None and now - datetime.fromisoformat(last) < timedelta(seconds=PROGRESS_SECONDS)
    if call.status != InvocationStatus.DISPATCHING or disturbs or is_early:
        return call, False
    call = move_call(call, progress=_progress(now, said.fraction, said.message))
    move_run(run, run.status, [events.tool_progress(call)])
    return call, True


def _progress(now: datetime, fraction: float | None, message: str | None) -> dict[str, Any]:
    text = shorten(clean_text(message), PROGRESS_MAX_CHARS) if message else None
    return {"fraction": fraction, "message": text, "at": clock.iso(now)}


@transaction.atomic
def expire_call(call_id: str) -> bool:
    """A call without an outcome in time → FAILED; the run continues. False if there is none or the run is locked."""
    run = lock_run(ToolInvocation.objects.values_list("run_id", flat=True).get(pk=call_id), wait=False)
    call = ToolInvocation.objects.filter(pk=call_id, awaiting__isnull=False, expires_at__lte=clock.now()).first()
    if run is None or call is None:
        return False
    _expire(run, call)
    return True


def _expire(run: Run, call: ToolInvocation) -> ToolInvocation:
    who = "The app" if call.awaiting == Awaiting.CLIENT else call.name
    failure = ToolFailure(CallError.TOOL_TIMEOUT, f"{who} gave no outcome in time.")
    return _end(run, call, failure, **to_tell(call, "expired"))


def _end(run: Run, call: ToolInvocation, outcome: ToolResult | ToolFailure, **told: Any) -> ToolInvocation:
    ended = move_call(call, **end_of(call, outcome) | NOT_AWAITING | told)
    kinds = set(ToolInvocation.open_of(run).values_list("awaiting", flat=True))
    after = awaiting(kinds)
    dropped = close_questions(invocation=call) if call.remote_task else []
    if dropped or (run.parked and not kinds):
        after["due_at"] = clock.now() + NUDGE_GRACE
    happened = [events.tool_completed(ended), *dropped]
    crash_after_commit("outcome")
    move_run(run, RunStatus.QUEUED if dropped else run.status, happened, **after)
    ledger.capture(ended.id, ended.credit_used)
    return ended


def _locked(call: ToolInvocation) -> tuple[Run, ToolInvocation]:
    """The call and its run as they are, with the run locked. Raises NotFound if the run was erased or purged."""
    run = lock_run(call.run_id)
    if run is None:
        raise NotFound
    return run, ToolInvocation.objects.defer("input").get(pk=call.pk)


def due_contacts(
    limit: int, of_a_user: int, tools: Collection[str], users: Collection[int]
) -> list[tuple[str, str, int, int]]:
    """Calls about which a tool's server is due to be contacted, but not those of ``tools`` and ``users``: id, tool,
    user, and number among the user's due calls, from 1 to ``of_a_user``. The longest due call of each user comes first.
    """
    due = ToolInvocation.objects.filter(contact_at__lte=clock.now())
    if not due.exists():  # in most looks; Django builds the whole query in 3 ms
        return []
    due = due.exclude(name__in=tools).exclude(run__user__in=users)
    turn = Window(RowNumber(), partition_by="run__user_id", order_by="contact_at")
    rows = due.annotate(turn=turn).filter(turn__lte=of_a_user).order_by("turn", "contact_at")
    return list(rows.values_list("pk", "name", "run__user_id", "turn")[:limit])


@transaction.atomic
def take_contacts(call_ids: Collection[str]) -> list[ToolInvocation]:
    """The due ones of these calls that no other process has taken, with their runs and users. In case this process
    dies, they become due again: open calls after CONTACT_SECONDS; ended ones after the next of TELL_AGAIN_SECONDS.
    """
    now = clock.now()
    due = ToolInvocation.objects.filter(pk__in=call_ids, contact_at__lte=now).select_related("run__user")
    due = due.defer("input", *(f"run__{name}" for name in WIDE))
    taken = list(due.select_for_update(no_key=True, skip_locked=True, of=("self",)))
    for call in taken:
        later = (CONTACT_SECONDS,) if call.is_open else TELL_AGAIN_SECONDS[call.contacts : call.contacts + 1]
        call.contact_at = now + timedelta(seconds=later[0]) if later else None
        call.contacts += 1
    ToolInvocation.objects.bulk_update(taken, ["contact_at", "contacts"])
    return taken


def record_contact(call: ToolInvocation, said: ToolResult | ToolFailure | Parked | None) -> None:
    """Record what the server of a call of ``take_contacts`` answered: the outcome, or that there is none yet. If the
    call had ended before, the server was only told so. Then, and after None, no further request about it is made.
    """
    if said is None or not call.is_open:
        ToolInvocation.objects.filter(pk=call.pk).update(contact_at=None, remote_task="")
        return
    if not isinstance(said, Parked):
        record_outcome(call, said)
        return
    if said.asks_user:
        _ask(call, said)
        return
    contact_at = clock.now() + timedelta(seconds=said.contact_in_seconds or 0)
    if not _taken(call).update(contact_at=contact_at, remote_task=said.remote_task or call.remote_task):
        return
    told: dict[str, Any] = {"fraction": said.fraction, "message": said.message or None}
    if any(value not in (None, (call.progress or {}).get(name)) for name, value in told.items()):
        record_outcome(call, said)


def _taken(call: ToolInvocation) -> QuerySet[ToolInvocation]:
    """The call's row, if it has not changed since ``take_contacts``."""
    known = {"contact_at": call.contact_at, "remote_task": call.remote_task}
    return ToolInvocation.objects.filter(pk=call.pk, status=InvocationStatus.DISPATCHING, **known)


@transaction.atomic
def _ask(call: ToolInvocation, still: Parked) -> None:
    """The server asks the user: the run opens a waitpoint when it resumes. No contact before the answer."""
    run, _ = _locked(call)
    if not _taken(call).exists():
        return
    question = Dialogue.from_text(still.remote_task).question
    assert question is not None  # noqa: S101  (otherwise it says when to ask again)
    changes = {"progress": _progress(clock.now(), None, still.message or question.text), "contact_at": None}
    call = move_call(call, remote_task=still.remote_task, **changes)
    resumes: dict[str, Any] = {"due_at": clock.now() + NUDGE_GRACE} if run.parked else {}
    move_run(run, run.status, [events.tool_progress(call)], **resumes)
