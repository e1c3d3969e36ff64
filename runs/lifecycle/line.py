"""The order of runs: one run of a chat after another, and at most RUN_USER_LIMIT running runs of a user. This module
writes a run's place (``blocked``, ``throttled``, ``due_at``) and its chat's active run; never a status.
"""

from datetime import timedelta
from typing import Any

from django.conf import settings
from django.contrib.auth import get_user_model
from django.db import transaction
from django.db.models import Count, Exists, OuterRef, Q, QuerySet, Subquery, Value
from django.db.models.expressions import RawSQL
from django.db.models.functions import Coalesce

from chats.models import Chat
from config.database.protected import ProtectedQuerySet
from config.database.queries import CompiledQuery
from config.database.writes import Writes
from config.kernel import clock
from config.queue.publisher import nudge_after_commit
from runs.models import Run, RunStatus

RUN_LEASE_LOSSES_MAX = 5  # lost workers after which a run fails with `WORKER_LOST`

EXECUTE = "runs.execute_run"
# Each start and each resume sends a nudge; the sweep waits this long before it sends another one.
NUDGE_GRACE = timedelta(seconds=5)


def throttled_runs(user_id: int) -> QuerySet[Run]:
    """The user's runs that wait until fewer of the user's runs are running, oldest first. Only their ids are loaded."""
    return Run.objects.filter(user_id=user_id, throttled=True).order_by("created_at", "pk").only("pk")


_next_throttled = CompiledQuery[Run](lambda user_id: throttled_runs(user_id).filter(due_at=None)[:1], int)


def nudge_next_throttled(user_id: int) -> None:
    """Nudge the user's oldest throttled run: it may take the place of a run that has stopped running. ``due_at`` marks
    it as nudged, so that other runs that end before its claim nudge the next one.
    """
    if _next_throttled.first(user_id) is None:
        return
    with transaction.atomic():
        not_nudged = throttled_runs(user_id).filter(due_at=None)
        waiting = not_nudged.select_for_update(no_key=True, skip_locked=True).first()
        if waiting is not None:
            Run.objects.filter(pk=waiting.pk).update(due_at=clock.now())
            nudge_after_commit(EXECUTE, waiting.pk)


def older_than(created_at: Any, run_id: Any) -> Q:
    # PostgreSQL stops reading the index at the first condition.
    return Q(created_at__lte=created_at) & (Q(created_at__lt=created_at) | Q(pk__lt=run_id))


def _to_claim(run_id: str) -> QuerySet[Run]:
    """The run, locked; how many other runs of its user are ``running``; whether it ``is_behind`` a throttled one."""
    others = Run.objects.filter(user_id=OuterRef("user_id")).exclude(pk=OuterRef("pk")).order_by()
    # A literal, because with a parameter PostgreSQL may keep a plan for all values, which reads every run of the user.
    status = RawSQL(f"'{RunStatus.RUNNING.value}'", ())  # noqa: S611  (a constant of our own)
    running = others.filter(status=status, parked=False).values("user_id").values(number=Count("*"))
    older = others.filter(older_than(OuterRef("created_at"), OuterRef("pk")), throttled=True)
    return (
        Run.objects.select_for_update(no_key=True)
        .filter(pk=run_id)
        .annotate(running=Coalesce(Subquery(running), Value(0)), is_behind=Exists(older))
    )


def _user_to_lock(run_id: str) -> QuerySet[Any]:
    users = get_user_model()._default_manager.select_for_update(no_key=True).only("pk")
    return users.filter(pk=Subquery(Run.objects.filter(pk=run_id).order_by().values("user_id")))


_locked_run = CompiledQuery[Run](_to_claim, str)
lock_user = CompiledQuery[Any](_user_to_lock, str)  # locks the row of the run's user, before the run's own


def lock_claimable(run_id: str, worker_id: str) -> Run | None:
    """The run's row, locked, if the worker may execute the run now. Running runs and older throttled runs have the
    places of RUN_USER_LIMIT first: if none is left, the run is marked as throttled.
    """
    if settings.RUN_USER_LIMIT:
        # Serializes the claims of one user's runs in all processes, so that each claim counts the claims before it.
        lock_user(run_id)
    run = _locked_run.first(run_id)
    if run is None or run.blocked or run.worker_id not in (None, worker_id):
        return None
    if run.parked and run.due_at is None and not run.throttled:
        return None  # one of its calls awaits an outcome
    if run.status not in (RunStatus.QUEUED, RunStatus.RUNNING) or run.lease_losses >= RUN_LEASE_LOSSES_MAX:
        return None
    if settings.RUN_USER_LIMIT and (run.status == RunStatus.QUEUED or run.parked):  # it has no place yet
        room = settings.RUN_USER_LIMIT - vars(run)["running"]
        older = throttled_runs(run.user_id).filter(older_than(run.created_at, run.pk))
        # At most ``room`` rows are read, however many wait.
        if room <= 0 or (vars(run)["is_behind"] and older[:room].count() == room):
            Run.objects.filter(pk=run.pk).update(throttled=True, due_at=None)
            return None
    return run


def in_line(chat_id: str) -> ProtectedQuerySet[Run]:
    return Run.objects.filter(chat_id=chat_id, status=RunStatus.QUEUED, blocked=True)


_next_blocked = CompiledQuery[Run](lambda chat_id: in_line(chat_id).order_by("created_at", "pk").only("pk")[:1], str)


def promote_next(run: Run) -> str | None:
    """The chat's next blocked run becomes its active run; nothing changes if ``run`` is not the active one. Locks the
    chat: call it before the run is locked. Returns the promoted run's id, for ``unblock`` once ``run`` has ended.
    """
    active = {"id": run.chat_id, "active_run_id": run.pk}
    if not Writes().update(Chat, active, _idle(run) | {"has_line": False}).do():
        return None
    # A second statement sees the runs that were enqueued while the first one waited for the chat's lock.
    following = _next_blocked.first(run.chat_id)
    if following is None:
        return None
    Writes().update(Chat, {"id": run.chat_id}, {"active_run_id": following.pk, "has_line": True}).do()
    return following.pk


def leave_chat(run: Run, guards: Writes, also: Writes) -> None:
    """``promote_next`` for a run with no run in line behind it, as parts of other statements: ``guards`` gets a
    condition that fails if a run is in line, ``also`` gets the change of the chat.
    """
    guards.lock(Chat, {"id": run.chat_id, "active_run_id": run.pk, "has_line": False})
    also.update(Chat, {"id": run.chat_id}, _idle(run))


def _idle(run: Run) -> dict[str, Any]:
    # The chat's next message gets a later time than this one, and so a later time than the message of ``run``.
    return {"active_run_id": None, "updated_at": clock.after(run.started_at or run.created_at)}


def unblock(run_id: str | None) -> None:
    """The promoted run may be claimed. Call it after the other run's end: at most one run of a chat is not blocked."""
    if run_id is None:
        return
    now = clock.now()
    Run.objects.filter(pk=run_id, blocked=True).update(blocked=False, due_at=now + NUDGE_GRACE, updated_at=now)
    nudge_after_commit(EXECUTE, run_id)
