"""The engine of a run worker process, which admits runs, cancels them, hands them over and stops the process; and its
heartbeat, a thread that renews the lease of these runs, and looks for cancels and lost work.
"""

import asyncio
import contextlib
import logging
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from django.conf import settings
from django.db import connection

from config.database.retry import CONNECTION_ERRORS, attempt, outage
from config.kernel import clock
from config.outbound import transport
from config.outbound.loop import raise_open_file_limit
from config.queue import jobs
from config.telemetry import logs, tracing
from runs import catalogue, lifecycle, metrics
from runs.engine.contacts import Contacts
from runs.engine.loop import execute
from runs.engine.process import Process
from runs.engine.session import Interruption, Session, claim, flush_forever
from runs.llm.registry import preload
from runs.models import TO_CANCEL, Run, RunStatus, Worker

logger = logging.getLogger(__name__)

# The time to hand runs over after the grace time. Both together are under 30 s, after which platforms kill.
CLOSE_SECONDS = 10.0
HAND_OVER_ROUNDS = 3
# How long a thread that computes for a tool can keep the interpreter from the event loop (docs/decisions/0018).
SWITCH_SECONDS = 0.001

RUN_CANCEL_POLL_SECONDS = 0.2  # between two looks for requests to cancel; at most a fifth of `RUN_LEASE_SECONDS`
BEATS_PER_LEASE = 5
CONTINUE_SECONDS = 0.01  # the pause if one step was too short to release all runs of lost workers


class Engine:
    """One in each process: ``start`` it once, ``offer`` it run ids from any thread, ``stop`` it."""

    def __init__(self) -> None:
        self.process = Process()
        # A run has a task before it is claimed, and a session after the claim.
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.sessions: dict[str, Session] = {}
        # Runs that were offered while their task was about to end, such as a parked run with an outcome at once.
        self.offered_again: set[str] = set()
        self.loop = asyncio.new_event_loop()
        self.contacts = Contacts(self.process)
        self.loop_thread = threading.Thread(target=self._run_loop, name="run-loop", daemon=True)
        self.heartbeat = Heartbeat(self)

    def start(self) -> None:
        preload()
        sys.setswitchinterval(SWITCH_SECONDS)
        raise_open_file_limit()  # a run that waits for a model or tools holds sockets
        metrics.tool_calls_open.labels("working").set_function(lambda: self.process.tool_places.taken)
        metrics.tool_calls_open.labels("waiting").set_function(lambda: self.process.tool_places.waiting)
        self.loop_thread.start()
        for step in (self.heartbeat.register, catalogue.refresh):
            # An outage of the database at the start is waited out, like any other.
            asyncio.run_coroutine_threadsafe(self.process.db(step), self.loop).result()
        self.heartbeat.start()

    def offer(self, run_id: str) -> None:
        """Execute the run if there is room and it can be claimed. Otherwise it stays queued for another worker."""
        if not self.heartbeat.stopped.is_set():
            self.loop.call_soon_threadsafe(self._admit, run_id)

    def drain(self) -> None:
        """Admit no more runs, and hand each run over at its next step. Can be called in a signal handler."""
        self.process.draining = True

    def stop(self, grace_seconds: float) -> None:
        """Drain for ``grace_seconds``, then hand over the runs that are left. Blocks."""
        self.drain()
        end = time.monotonic() + grace_seconds
        while self.tasks and time.monotonic() < end:
            time.sleep(0.05)
        self.heartbeat.stopped.set()
        asyncio.run_coroutine_threadsafe(self._close(), self.loop).result(timeout=CLOSE_SECONDS)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.loop_thread.join(timeout=1)
        self.heartbeat.join(timeout=1)
        self.process.model_places.thread.shutdown(wait=True, cancel_futures=True)
        self.process.db_threads.shutdown(wait=True, cancel_futures=True)
        self.process.tool_threads.shutdown()
        self.process.file_threads.shutdown()

    def request_cancel(self, run_ids: list[str]) -> None:
        self.loop.call_soon_threadsafe(self._cancel, run_ids, Interruption.REQUESTED)

    def drop_all(self) -> None:
        """Stop all runs without another write. Returns when all are stopped, or when the process ends."""
        dropped = threading.Event()

        def drop() -> None:
            self._cancel(list(self.tasks), Interruption.LOST)
            dropped.set()

        self.loop.call_soon_threadsafe(drop)
        while not dropped.wait(1.0) and not self.heartbeat.stopped.is_set():
            pass

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self.loop)
        process, texts = self.process, (self.process.unwritten, self.process.begun)
        always = [flush_forever(process, gathered, self._interrupt) for gathered in texts]
        tasks = [self.loop.create_task(work) for work in (*always, self.contacts.run(), process.model_places.run())]
        self.loop.run_forever()
        for task in tasks:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self.loop.close()

    def _admit(self, run_id: str) -> None:
        if run_id in self.tasks:
            self.offered_again.add(run_id)
            return
        if self.process.draining or len(self.tasks) >= settings.RUN_WORKER_CAPACITY:
            return
        self.tasks[run_id] = self.loop.create_task(self._execute(run_id), name=run_id)

    async def _execute(self, run_id: str) -> None:
        logs.run_id.set(run_id)
        try:
            claimed = await claim(self.process, run_id)
            if claimed is not None:
                session = self.sessions[run_id] = Session(self.process, claimed)
                parent = tracing.parent_of({"traceparent": claimed.run.trace_parent})
                with tracing.span("run", parent=parent, **{"run.id": run_id}) as span:
                    await execute(session)
                    if session.run.status == RunStatus.FAILED:
                        tracing.set_failed(span, str(session.run.error_code))
        except asyncio.CancelledError:
            pass  # lost or shut down: nothing more may be written
        except Exception:
            logger.exception("run %s could not be executed; it may be taken over", run_id)
        finally:
            self.process.unwritten.pop(run_id, None)
            self.process.begun.pop(run_id, None)
            ended = self.sessions.pop(run_id, None)
            self.tasks.pop(run_id, None)
            if run_id in self.offered_again:
                self.offered_again.remove(run_id)
                # Not after a lost lease: this worker may not have a new lease yet, so the claim would be lost, too.
                if ended is not None and ended.run.worker_id is None:
                    self._admit(run_id)

    def _cancel(self, run_ids: list[str], why: Interruption) -> None:
        """A requested cancel interrupts a run only once, so that the run can be recorded as cancelled. A run without a
        session is not claimed yet; the heartbeat finds its request again.
        """
        for run_id in run_ids:
            session = self.sessions.get(run_id)
            is_resumed = why in (Interruption.REQUESTED, Interruption.BEHIND)  # the run's task makes further steps
            if is_resumed and (session is None or session.interruption is not None):
                continue
            if session is not None:
                session.interruption = why
            if run_id in self.tasks:
                self.tasks[run_id].cancel()

    def _interrupt(self, session: Session) -> None:
        """Make the session read its run again; not an old session, which a flush can have after a new claim."""
        if self.sessions.get(session.run.id) is session:
            self._cancel([session.run.id], Interruption.BEHIND)

    async def _close(self) -> None:
        tasks, contacts = list(self.tasks.values()), list(self.contacts.tasks.values())
        self._cancel(list(self.tasks), Interruption.SHUT_DOWN)
        for contact in contacts:
            contact.cancel()
        await asyncio.gather(*tasks, *contacts, return_exceptions=True)
        await self.process.db(hand_over_all, self.process.worker_id)
        await self.process.model_places.ask()
        await transport.close_sessions()


def hand_over_all(worker_id: str) -> None:
    """Hand over the runs that the worker owns according to the database; a session may lack a commit whose answer was
    lost. The worker's row is deleted when it owns no run; otherwise other workers find the runs by its expired lease.
    """
    owned = Run.objects.filter(worker_id=worker_id, status=RunStatus.RUNNING)
    for _ in range(HAND_OVER_ROUNDS):
        for run in owned.all():
            # The flusher may have written text since the run was read; the next round reads it again.
            with contextlib.suppress(lifecycle.LeaseLost):
                lifecycle.hand_over(run)
                if run.cancel_requested_at is not None:
                    lifecycle.request_cancel(run.pk)  # a cancel needs no new owner
    left = list(owned.values_list("pk", flat=True))
    for run_id in left:
        logger.warning("run %s was not handed over; its lease will expire", run_id)
    if not left:
        Worker.objects.filter(pk=worker_id).delete()


class Heartbeat(threading.Thread):
    """Renews the lease of all runs of its process, and looks for cancels and lost work."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(name="run-heartbeat", daemon=True)
        self.engine, self.process, self.run_ids = engine, engine.process, engine.tasks.keys()
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
        self.engine.drop_all()
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
                    self.engine.offer(run_id)
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
            self.engine.request_cancel(run_ids)
