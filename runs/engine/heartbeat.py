"""The heartbeat of a run worker, a thread: it renews the lease of all its runs, and looks for cancels and lost work."""

import logging
import os
import random
import socket
import threading
from collections.abc import Callable, Collection
from datetime import timedelta

from django.conf import settings
from django.db import connection

from config.database.retry import CONNECTION_ERRORS, attempt, outage
from config.kernel import clock
from config.queue import jobs
from config.telemetry import logs
from runs import catalogue, lifecycle
from runs.engine.process import Process
from runs.models import TO_CANCEL, Run, Worker

RUN_CANCEL_POLL_SECONDS = 0.2  # between two looks for requests to cancel; at most a fifth of `RUN_LEASE_SECONDS`

logger = logging.getLogger(__name__)

BEATS_PER_LEASE = 5
CONTINUE_SECONDS = 0.01  # the pause if one step was too short to release all runs of lost workers


class Heartbeat(threading.Thread):
    """``run_ids`` are the runs that the process executes. The callables are called on this thread. ``drop_all`` stops
    all runs without another write. It returns when all are stopped, or when the process ends.
    """

    def __init__(
        self,
        process: Process,
        run_ids: Collection[str],
        *,
        offer: Callable[[str], None],
        cancel: Callable[[list[str]], None],
        drop_all: Callable[[], None],
    ) -> None:
        super().__init__(name="run-heartbeat", daemon=True)
        self.process, self.run_ids = process, run_ids
        self.offer, self.cancel, self.drop_all = offer, cancel, drop_all
        self.stopped = threading.Event()
        self.gap_ended = float("-inf")  # when the last time without a lease ended, by ``clock.steady``
        # The time limit of a step, in seconds. A step must not delay the next beat for long.
        self.step_seconds = settings.RUN_LEASE_SECONDS / BEATS_PER_LEASE / 2
        # Each sweep looks at the throttled runs of the users after this one.
        self.after_user = 0

    def run(self) -> None:
        # For the log lines of the heartbeat, and of the work that it does for the runs that it finds.
        logs.task_id.set(self.process.worker_id)
        beat_every = settings.RUN_LEASE_SECONDS / BEATS_PER_LEASE
        # The processes look for the same work, so their looks are spread over time.
        spread = random.uniform(0.8, 1.2)  # noqa: S311
        due: dict[Callable[[], bool | None], float] = {
            self._beat: beat_every,
            # As often as leases are renewed, so that a takeover takes little longer than the time of a lease.
            self._reap: min(beat_every, settings.RUN_SWEEP_SECONDS) * spread,
            self._sweep: settings.RUN_SWEEP_SECONDS * spread,
            self._refresh: catalogue.MAX_AGE_SECONDS,
        }
        next_at = dict.fromkeys(due, 0.0)

        def work() -> None:
            for step, every in due.items():
                if clock.steady() >= next_at[step]:
                    is_unfinished = step()
                    next_at[step] = clock.steady() + (0.0 if is_unfinished else every)
            self._look_for_cancels()

        look_every = min(RUN_CANCEL_POLL_SECONDS, beat_every)
        wait = pause = look_every
        while not self.stopped.wait(wait):
            try:
                attempt(work)
                outage.ended()
                wait = CONTINUE_SECONDS if min(next_at.values()) <= clock.steady() else look_every
                pause = look_every
                continue
            except CONNECTION_ERRORS as error:
                outage.failed(error)
            except Exception:
                connection.close()
                logger.exception("the heartbeat failed; trying again")
            # Not longer than a beat, so that the lease is renewed in time after a short outage.
            pause = min(pause * 2, beat_every)
            wait = pause * random.uniform(0.5, 1.0)  # noqa: S311
        connection.close()

    def register(self) -> None:
        """Insert a new worker row, which is a new lease."""
        begun, lease = clock.steady(), timedelta(seconds=settings.RUN_LEASE_SECONDS)
        try:  # includes ``clock.now``, which may ask the database for the time
            worker = Worker(host=socket.gethostname()[:255], pid=os.getpid(), expires_at=clock.now() + lease)
            worker.save(force_insert=True)
        except CONNECTION_ERRORS:
            self.gap_ended = begun  # after a start in an outage, other workers get time to come back
            raise
        self.process.worker_id = worker.pk
        self.process.lease_until = begun + settings.RUN_LEASE_SECONDS

    def _beat(self) -> None:
        begun, lease = clock.steady(), timedelta(seconds=settings.RUN_LEASE_SECONDS)
        if begun >= self.process.lease_until:
            self.gap_ended = begun
        if Worker.objects.filter(pk=self.process.worker_id).update(expires_at=clock.now() + lease):
            self.process.lease_until = begun + settings.RUN_LEASE_SECONDS
            return
        # Another process has noticed that the lease had expired, and has released the runs.
        logger.warning("this worker's lease was lost; its %d runs continue elsewhere", len(self.run_ids))
        # The new lease begins after all runs of the old one are dropped: otherwise it would seem to cover them.
        self.process.lease_until = 0.0
        self.drop_all()
        if not self.stopped.is_set():
            self.register()
            logs.task_id.set(self.process.worker_id)

    def _reap(self) -> bool:
        """Release the runs of lost workers. Returns whether the time was too short for all."""
        begun = clock.steady()

        def reap_workers() -> int:
            # What delayed this process (an outage, a suspension) has delayed others, too. They get the time of a lease
            # to come back; otherwise all processes would take each other's runs.
            moment, now = clock.now(), clock.steady()
            if now >= self.process.lease_until or now - self.gap_ended < settings.RUN_LEASE_SECONDS:
                return 0
            # ``moment`` is read first: a suspension of this process from here on must not make the others late.
            return lifecycle.reap_workers(self.step_seconds, moment)

        jobs.stages("sweep-runs", reap_workers)
        return clock.steady() - begun >= self.step_seconds

    def _sweep(self) -> None:
        def offer_due_runs() -> int:
            offered = 0
            for find in (lifecycle.take_due_runs, self._wakeable_runs):
                room = 0 if self.process.draining else settings.RUN_WORKER_CAPACITY - len(self.run_ids)
                for run_id in find(room) if room > 0 else ():
                    self.offer(run_id)
                    offered += 1
            return offered

        executed = {"worker_id": self.process.worker_id, "executing": self.run_ids, "leaving": self.stopped.is_set}
        jobs.stages("sweep-runs", lifecycle.release_unexecuted, **executed, seconds=self.step_seconds)
        lifecycle.repair(self.step_seconds)
        jobs.stages("sweep-runs", offer_due_runs)

    def _wakeable_runs(self, limit: int) -> list[str]:
        found, self.after_user = lifecycle.wakeable_runs(limit, self.after_user)
        return found

    def _refresh(self) -> None:
        clock.sync()
        catalogue.refresh()

    def _look_for_cancels(self) -> None:
        to_cancel = Run.objects.filter(TO_CANCEL, worker_id=self.process.worker_id)
        if run_ids := list(to_cancel.values_list("pk", flat=True)):
            self.cancel(run_ids)
