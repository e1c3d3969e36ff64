"""Finds work whose message was lost: lost workers and their runs, runs that no worker took, waitpoints after their
time. The heartbeats of run workers call these functions, at any moment and several at once; a task of beat calls
``sweep``. A row that is locked or cannot be processed stops no other row. A call that lasts ``seconds`` ends early.
"""

import logging
import math
import random
from collections.abc import Callable, Container, Sequence
from datetime import datetime, timedelta
from functools import partial

from django.conf import settings
from django.db import transaction
from django.db.models import Count, Exists, OuterRef, Q, QuerySet

from config.database.batches import delete_batch, in_order, limit_lock_wait
from config.database.queries import read
from config.kernel import clock
from config.queue import jobs
from credits import sums
from runs import metrics
from runs.errors import RunError
from runs.lifecycle import calls, line, runs, spending, waitpoints
from runs.lifecycle.line import NUDGE_GRACE, throttled_runs
from runs.lifecycle.moves import HOUSEKEEPING_LOCK_SECONDS, lock_run, move_lost, move_run
from runs.models import TO_TAKE_OVER, Run, RunStatus, ToolInvocation, Waitpoint, WaitpointStatus, Worker

logger = logging.getLogger(__name__)

JOB = "sweep-runs"
BATCH = 500
RELEASE_BATCH = 100  # runs that are released in one transaction

# When this process began to look for late workers without a gap, and when it last looked, by ``clock.steady``.
_watched = (0.0, float("-inf"))

_next_look = float("-inf")  # when this process next looks for runs whose credits have come, by ``clock.steady``
LOOK_PAUSE = 50
LOOK_PAUSE_SECONDS = 10.0

CLAIMABLE = Q(status=RunStatus.QUEUED, blocked=False, throttled=False) | (TO_TAKE_OVER & Q(throttled=False))

# Goes from user to user along the index of throttled runs, from the given user on: a user costs one step, however many
# throttled runs there are. The ORDER BY names all columns of the index, so that the database uses no other index.
_THROTTLED_USERS = """
    WITH RECURSIVE throttled (user_id, step) AS (
        SELECT CAST(%s AS bigint), 0
        UNION ALL
        SELECT (
            SELECT run.user_id FROM runs_run run WHERE run.throttled AND run.user_id > throttled.user_id
            ORDER BY run.user_id, run.created_at, run.id LIMIT 1
        ), step + 1
        FROM throttled WHERE throttled.user_id IS NOT NULL AND step < %s
    )
    SELECT user_id FROM throttled WHERE user_id IS NOT NULL AND step > 0 ORDER BY user_id
"""


def sweep() -> int:
    """Repairs that cannot wait for a run worker. Returns how many workers, runs and waitpoints were handled."""
    return jobs.stages(JOB, reap_late_workers, repair)


def repair(seconds: float = math.inf) -> int:
    """Settle the holds of lost runs, end waitpoints and calls after their time, resume runs whose credits have come."""
    works = settle_lost_turns, expire_waitpoints, expire_calls, resume_paid_runs
    return jobs.stages(JOB, *works, seconds=seconds)


def reap_late_workers() -> int:
    """``reap_workers`` for a process without a lease. What delayed this process (an outage, a suspension) has delayed
    the workers, too. So they get the time of a lease to come back.
    """
    global _watched
    moment = clock.now()
    Worker.objects.filter(expires_at__lt=moment).exists()  # waits until the database answers
    now, away = clock.steady(), max(settings.RUN_LEASE_SECONDS, 2 * settings.RUN_SWEEP_SECONDS)
    since, last = _watched
    _watched = since if 0 <= now - last < away else now, now
    if now - _watched[0] < settings.RUN_LEASE_SECONDS:
        return 0
    return reap_workers(moment=moment - timedelta(seconds=away))  # a shorter gap was not noticed


def reap_workers(seconds: float = math.inf, moment: datetime | None = None) -> int:
    """Delete the workers whose lease expired before ``moment`` (default: now), and release the runs of workers that no
    longer exist. Runs that lost their worker too often fail. Returns how many workers were lost.
    """
    expired = Worker.objects.filter(expires_at__lt=moment or clock.now())
    # The heartbeat updates the same row: either it comes first and the lease holds, or it finds no row.
    lost = delete_batch(expired, BATCH) if expired.exists() else 0
    # This also finds a run whose claim was in flight while its worker was deleted.
    gone = ~Exists(Worker.objects.filter(pk=OuterRef("worker_id")))
    ownerless = Run.objects.filter(gone, status=RunStatus.RUNNING, worker_id__isnull=False)
    run_ids = in_order(ownerless, "worker_id", BATCH)
    list(jobs.each_batch(JOB, run_ids, partial(release, ownerless), RELEASE_BATCH, seconds))
    # Searched at each call: the process that noticed the last loss may have died before it ended the run.
    worn = Run.objects.filter(TO_TAKE_OVER, lease_losses__gte=line.RUN_LEASE_LOSSES_MAX)
    list(jobs.each(JOB, in_order(worn, "pk", BATCH), give_up, seconds))
    return lost


def settle_lost_turns(seconds: float = math.inf) -> int:
    """Settle released runs that no worker takes over soon: they must not keep their users' credits held."""
    held = Exists(sums.open_holds_of(run_id=OuterRef("pk"), tool_key=None))
    left = Run.objects.filter(TO_TAKE_OVER, held, updated_at__lt=clock.now() - NUDGE_GRACE)
    return sum(1 for _ in jobs.each(JOB, in_order(left, "pk", BATCH), settle_lost, seconds))


def release_unexecuted(
    worker_id: str, executing: Container[str], leaving: Callable[[], bool], seconds: float = math.inf
) -> int:
    """Release the runs that a live worker owns but does not execute: the answer to a claim's commit was lost, or a step
    failed and cannot be repaired. Each release counts as a loss, so that no run is released for ever. Returns how many.

    ``executing`` is read after the runs' rows, and contains a run from before its claim. ``leaving`` is called last: a
    worker that shuts down stops executing its runs before it hands them over, and that is no loss.
    """
    owned = Run.objects.filter(worker_id=worker_id, status=RunStatus.RUNNING)
    unexecuted = [run_id for run_id in list(owned.values_list("pk", flat=True)) if run_id not in executing]
    if not unexecuted or leaving():
        return 0
    released = len(list(jobs.each_batch(JOB, unexecuted, partial(release, owned), RELEASE_BATCH, seconds)))
    if released:
        logger.warning("%d runs that this worker owned but did not execute may be taken over", released)
    return released


@transaction.atomic
def release(rows: QuerySet[Run], run_ids: Sequence[str]) -> list[str]:
    """Release the runs that are still among ``rows`` and not locked: they lost their worker, and another may take them
    over. Returns their ids. The cost of their open turns is charged later, by the next owner's claim, by the run's end
    or by ``settle_lost``: charging here would lock the accounts of many users at once.
    """
    limit_lock_wait(HOUSEKEEPING_LOCK_SECONDS)
    running = rows.filter(pk__in=run_ids, status=RunStatus.RUNNING).order_by("pk")
    lost = list(running.select_for_update(no_key=True, skip_locked=True).only("running_since", "ran_ms"))
    if lost:
        move_lost(lost)
        transaction.on_commit(partial(metrics.leases_lost.inc, len(lost)), robust=True)
    return [run.pk for run in lost]


@transaction.atomic
def settle_lost(run_id: str) -> None:
    """Charge the open turn of a released run that no worker has taken over, and release the rest of the turn's hold."""
    limit_lock_wait(HOUSEKEEPING_LOCK_SECONDS)
    rows = Run.objects.filter(pk=run_id, status=RunStatus.RUNNING, worker_id=None, parked=False)
    run = rows.select_for_update(no_key=True, skip_locked=True).first()
    if run is not None and (changes := spending.settle(run)):
        move_run(run, RunStatus.RUNNING, (), **changes)


@transaction.atomic
def give_up(run_id: str) -> None:
    """A running run that lost its worker too often → failed. Other runs, and locked ones, are left as they are."""
    run = lock_run(run_id, wait=False)
    if run is None or run.status != RunStatus.RUNNING or run.worker_id is not None:
        return
    if run.lease_losses >= line.RUN_LEASE_LOSSES_MAX:
        message = f"The run lost its worker {run.lease_losses} times."
        runs.finish(run, runs.RunFailed(RunError.WORKER_LOST, message), owned=False)


def take_due_runs(limit: int) -> list[str]:
    """Runs that could execute but that no worker took in time, the longest due first. They become due again later."""
    due = Run.objects.filter(CLAIMABLE, due_at__lte=clock.now()).order_by("due_at")
    if not due.exists():
        return []
    # A backlog needs no more messages. But the worker that took the message may die, so the next message comes as soon
    # as the runs of a lost worker are taken over.
    again = clock.now() + max(NUDGE_GRACE, timedelta(seconds=settings.RUN_LEASE_SECONDS))
    with transaction.atomic():
        taken = list(due.select_for_update(no_key=True, skip_locked=True).values_list("pk", flat=True)[:limit])
        Run.objects.filter(pk__in=taken).update(due_at=again)
    return taken


def wakeable_runs(limit: int, after: int = 0) -> tuple[list[str], int]:
    """At most ``limit`` throttled runs that may execute without having been nudged: the nudge was lost, or the limit
    was raised. Looks at BATCH users with ids above ``after``. Returns the runs, and ``after`` for the next call.
    """
    users = [user_id for (user_id,) in read(_THROTTLED_USERS, [after, BATCH])]
    most = settings.RUN_USER_LIMIT or math.inf
    counted = Run.objects.filter(user_id__in=users, status=RunStatus.RUNNING, parked=False).order_by()
    running = dict(counted.values_list("user_id").annotate(Count("pk")))
    found: list[str] = []
    for user_id in users:
        if len(found) >= limit:
            return found, after
        room = min(most - running.get(user_id, 0), limit - len(found))
        if room > 0:
            found += throttled_runs(user_id).values_list("pk", flat=True)[: int(room)]
        after = user_id
    return found, after if len(users) == BATCH else 0


def expire_waitpoints(seconds: float = math.inf) -> int:
    past = Waitpoint.objects.filter(status=WaitpointStatus.PENDING, expires_at__lte=clock.now())
    return sum(jobs.each(JOB, in_order(past, "expires_at", BATCH), waitpoints.expire_waitpoint, seconds))


def expire_calls(seconds: float = math.inf) -> int:
    past = ToolInvocation.objects.filter(awaiting__isnull=False, expires_at__lte=clock.now())
    return sum(jobs.each(JOB, in_order(past, "expires_at", BATCH), calls.expire_call, seconds))


def resume_paid_runs(seconds: float = math.inf) -> int:
    """Resume runs whose credits have come without a nudge: the nudge was lost, or other runs have released their holds.
    Returns for how many users. The search reads all waiting runs (0.2 s for 100,000 on PostgreSQL), so each process
    pauses for LOOK_PAUSE times that duration, at most LOOK_PAUSE_SECONDS.
    """
    global _next_look
    begun = clock.steady()
    if 0 < _next_look - begun <= LOOK_PAUSE_SECONDS:  # a longer pause comes from another clock: a fork or a test
        return 0
    users = list(waitpoints.payable().order_by().values_list("run__user_id", flat=True).distinct())
    random.shuffle(users)  # users of whom no run can be resumed yet, however many they are, must not hide the others
    _next_look = clock.steady() + min(LOOK_PAUSE * (clock.steady() - begun), LOOK_PAUSE_SECONDS)
    return sum(1 for _ in jobs.each(JOB, users, waitpoints.resume_paid, seconds))
