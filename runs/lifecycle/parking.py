"""Tool calls whose outcome comes without a worker: from the tool's callback, or from the caller's app. And parked runs,
all of whose open calls are such calls (docs/architecture.md, "Parked calls"). An outcome needs no lease: its
transaction locks the run. A worker that owns the run finds the run's stream ahead and reads the run again.
"""

from collections.abc import Collection
from datetime import datetime, timedelta
from typing import Any

from django.db import transaction
from django.db.models import QuerySet, Window
from django.db.models.functions import RowNumber

from config.kernel import clock
from config.kernel.errors import NotFound
from credits import ledger
from runs import events
from runs.errors import CallError
from runs.lifecycle import calls
from runs.lifecycle.calls import NOT_AWAITING
from runs.lifecycle.crash import crash_after_commit
from runs.lifecycle.line import NUDGE_GRACE, lock_user, nudge_next_throttled
from runs.lifecycle.moves import WIDE, Moved, fence, lock_run, move_call, move_run, stop_running
from runs.models import Awaiting, InvocationStatus, Run, RunStatus, ToolInvocation
from runs.tools.base import PROGRESS_MAX_CHARS, Parked, ToolFailure, ToolResult, clean_text, shorten, tool_error
from runs.tools.questions import Dialogue

PROGRESS_SECONDS = 1  # At most one progress report of a call is kept in this many seconds.
TELL_AGAIN_SECONDS = (30, 60)  # pauses between the attempts to tell a tool's server about the end of a call
# The longest time of a request about an open call; after it, another worker makes the request again.
CONTACT_SECONDS = 60


@transaction.atomic
def park_call(run: Run, call: ToolInvocation, parked: Parked) -> Moved:
    """The DISPATCHING call now awaits its tool; or → FAILED if the user has PARKED_CALLS_PER_USER such calls."""
    lock_user(run.pk)  # so that calls of other runs are counted
    fence(run)
    if calls.room_to_park(run.user_id) <= 0:
        told = calls.to_tell(call, "run_ended") | {"remote_task": parked.remote_task}
        return calls.record_call_result(run, call, tool_error(calls.TOO_MANY_PARKED), **told)
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
def park_run(run: Run) -> Moved:
    """The owner gives up its lease and the run's place: all open calls await outcomes from outside."""
    changes = stop_running(run) | {"parked": True, "due_at": None}
    run = move_run(run, RunStatus.RUNNING, (), **changes)
    nudge_next_throttled(run.user_id)
    crash_after_commit("run_parked")
    return Moved(run)


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
    return _end(run, call, failure, **calls.to_tell(call, "expired"))


def _end(run: Run, call: ToolInvocation, outcome: ToolResult | ToolFailure, **told: Any) -> ToolInvocation:
    ended = move_call(call, **calls.end_of(call, outcome) | NOT_AWAITING | told)
    kinds = set(ToolInvocation.open_of(run).values_list("awaiting", flat=True))
    after = calls.awaiting(kinds)
    dropped = calls.close_questions(invocation=call) if call.remote_task else []
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
