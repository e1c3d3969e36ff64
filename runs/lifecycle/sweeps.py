"""Finds the work that no message led to: lost workers, runs that no worker took, waitpoints after their time.

Every function may be called at any moment and any number of times at once; the heartbeat of each run worker and a task
of beat call them.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from datetime import timedelta

from django.conf import settings
from django.db import transaction
from django.db.models import Exists, OuterRef, Q

from config.kernel import clock
from config.queue.nudges import nudge
from runs.lifecycle import runs, waitpoints
from runs.lifecycle.line import EXECUTE, NUDGE_GRACE, throttled_runs
from runs.models import Run, RunStatus, Waitpoint, WaitpointStatus, Worker

BATCH = 500

CLAIMABLE = Q(status=RunStatus.QUEUED, blocked=False, throttled=False) | Q(status=RunStatus.RUNNING, worker_id=None)


def sweep() -> int:
    """One pass over all of it. Returns how many workers, waitpoints and runs it dealt with."""
    seen = reap_workers() + expire_waitpoints()
    now = clock.now()
    due = due_runs(BATCH)
    # A backlog does not need more messages. But the worker that took this one may die with it, so the next message
    # comes no later than a lost worker's runs are taken over.
    again = max(NUDGE_GRACE, timedelta(seconds=settings.RUN_LEASE_SECONDS))
    Run.objects.filter(CLAIMABLE, pk__in=due).update(due_at=now + again)
    for run_id in due:
        nudge(EXECUTE, run_id)
    # A throttled run may execute although no nudge said so: the nudge was lost, or the limit was raised.
    for user_id in Run.objects.filter(throttled=True).values_list("user_id", flat=True).distinct()[:BATCH]:
        running = Run.objects.filter(user_id=user_id, status=RunStatus.RUNNING).count()
        room = max(0, settings.RUN_USER_LIMIT - running) if settings.RUN_USER_LIMIT else BATCH
        for run_id in throttled_runs(user_id).values_list("pk", flat=True)[:room]:
            nudge(EXECUTE, run_id)
    return seen + len(due)


def reap_workers() -> int:
    """Release the runs of workers whose lease expired; runs that lost their worker too often fail. Returns how many
    workers were lost.
    """
    reaped = 0
    for worker_id in Worker.objects.filter(expires_at__lt=clock.now()).values_list("pk", flat=True)[:BATCH]:
        with transaction.atomic():
            # The heartbeat updates the same row: either it comes first and the lease holds, or it finds no row.
            expired = Worker.objects.select_for_update(skip_locked=True).filter(
                pk=worker_id, expires_at__lt=clock.now()
            )
            if not expired.exists():
                continue
            runs.release_runs(worker_id)
            Worker.objects.filter(pk=worker_id).delete()
        reaped += 1
    # A claim that was in flight while its worker was reaped belongs to a worker that no longer exists.
    ownerless = Run.objects.filter(~Exists(Worker.objects.filter(pk=OuterRef("worker_id"))), status=RunStatus.RUNNING)
    for gone in set(ownerless.filter(worker_id__isnull=False).values_list("worker_id", flat=True)[:BATCH]):
        runs.release_runs(str(gone))
    # Searched for each time: a process that noticed the last loss may have died before it ended the run.
    worn = Run.objects.filter(status=RunStatus.RUNNING, worker_id=None, lease_losses__gte=settings.RUN_LEASE_LOSSES_MAX)
    for run_id in list(worn.values_list("pk", flat=True)[:BATCH]):
        runs.give_up(run_id)
    return reaped


def release_unexecuted(worker_id: str, executing: Container[str], leaving: Callable[[], bool]) -> list[str]:
    """Release the runs that a live worker owns but does not execute, which would otherwise wait for ever: the answer to
    a claim's commit was lost, or a step failed beyond repair. Each release counts as a loss, so that no run goes round
    for ever. Returns their ids.

    ``executing`` is read after the runs, and contains a run before it is claimed. ``leaving`` is called last: a worker
    that shuts down stops executing its runs before it hands them over, which is no loss.
    """
    owned = list(Run.objects.filter(worker_id=worker_id, status=RunStatus.RUNNING).values_list("pk", flat=True))
    unexecuted = [run_id for run_id in owned if run_id not in executing]
    if not unexecuted or leaving():
        return []
    runs.release_runs(worker_id, unexecuted)
    return unexecuted


def due_runs(limit: int) -> list[str]:
    """Runs that could execute and that no worker took in time, longest due first."""
    found = Run.objects.filter(CLAIMABLE, due_at__lte=clock.now()).order_by("due_at")
    return list(found.values_list("pk", flat=True)[: min(limit, BATCH)])


def expire_waitpoints() -> int:
    """Returns how many expired."""
    past = Waitpoint.objects.filter(status=WaitpointStatus.PENDING, expires_at__lte=clock.now()).order_by("expires_at")
    return sum(waitpoints.expire_waitpoint(pk) for pk in list(past.values_list("pk", flat=True)[:BATCH]))
