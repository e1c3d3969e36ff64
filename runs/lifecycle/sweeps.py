"""What finds the work that no message told of: lost workers, runs nobody took, waitpoints past their time.

Safe at any moment and any number of times at once; each process's heart and beat's task call it.
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
from runs.lifecycle.moves import EXECUTE, NUDGE_GRACE, throttled_runs
from runs.models import Run, RunStatus, Waitpoint, WaitpointStatus, Worker

BATCH = 500

CLAIMABLE = Q(status=RunStatus.QUEUED, blocked=False, throttled=False) | Q(status=RunStatus.RUNNING, worker_id=None)


def sweep() -> int:
    """All of it, once. Returns how many workers, waitpoints and runs it saw to."""
    seen = reap_workers() + expire_waitpoints()
    now = clock.now()
    due = due_runs(BATCH)
    # A backlog is no reason for more messages; but whoever took this one may die with it, so not for longer than a
    # lost worker's runs wait either.
    again = max(NUDGE_GRACE, timedelta(seconds=settings.RUN_LEASE_SECONDS))
    Run.objects.filter(CLAIMABLE, pk__in=due).update(due_at=now + again)
    for run_id in due:
        nudge(EXECUTE, run_id)
    # Room that was made without the nudge getting through, or by a higher limit.
    for user_id in Run.objects.filter(throttled=True).values_list("user_id", flat=True).distinct()[:BATCH]:
        running = Run.objects.filter(user_id=user_id, status=RunStatus.RUNNING).count()
        room = max(0, settings.RUN_USER_LIMIT - running) if settings.RUN_USER_LIMIT else BATCH
        for run_id in throttled_runs(user_id).values_list("pk", flat=True)[:room]:
            nudge(EXECUTE, run_id)
    return seen + len(due)


def reap_workers() -> int:
    """Give the runs of workers whose lease expired to others; those that were lost too often fail. Returns how many
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
            runs.lose_worker(worker_id)
            Worker.objects.filter(pk=worker_id).delete()
        reaped += 1
    # A claim that was on its way while its worker was reaped belongs to a worker that is no more.
    ownerless = Run.objects.filter(~Exists(Worker.objects.filter(pk=OuterRef("worker_id"))), status=RunStatus.RUNNING)
    for gone in set(ownerless.filter(worker_id__isnull=False).values_list("worker_id", flat=True)[:BATCH]):
        runs.lose_worker(str(gone))
    # Looked for rather than remembered: whoever noticed the last loss may have died before it gave the run up.
    worn = Run.objects.filter(status=RunStatus.RUNNING, worker_id=None, lease_losses__gte=settings.RUN_LEASE_LOSSES_MAX)
    for run_id in list(worn.values_list("pk", flat=True)[:BATCH]):
        runs.give_up(run_id)
    return reaped


def drop_uncarried(worker_id: str, carried: Container[str], leaving: Callable[[], bool]) -> list[str]:
    """Runs that a live worker owns but does not carry would wait for ever: a claim's commit whose answer was lost, a
    step that failed beyond repair. They go the way of a lost worker's, so that no run goes round endlessly.

    ``carried`` is asked after the runs are read, and holds a run from before it is claimed. ``leaving`` is asked last:
    a worker that shuts down lets go of its runs before it hands them over, which is no loss. Returns their ids.
    """
    owned = list(Run.objects.filter(worker_id=worker_id, status=RunStatus.RUNNING).values_list("pk", flat=True))
    dropped = [run_id for run_id in owned if run_id not in carried]
    if not dropped or leaving():
        return []
    runs.lose_worker(worker_id, dropped)
    return dropped


def due_runs(limit: int) -> list[str]:
    """Runs that could execute and that nobody took in time, longest due first."""
    found = Run.objects.filter(CLAIMABLE, due_at__lte=clock.now()).order_by("due_at")
    return list(found.values_list("pk", flat=True)[: min(limit, BATCH)])


def expire_waitpoints() -> int:
    """Returns how many expired."""
    past = Waitpoint.objects.filter(status=WaitpointStatus.PENDING, expires_at__lte=clock.now()).order_by("expires_at")
    return sum(waitpoints.expire(pk) for pk in list(past.values_list("pk", flat=True)[:BATCH]))
