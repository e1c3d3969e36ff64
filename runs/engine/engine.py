"""The engine of a run worker process: it admits runs, cancels them, hands them over and stops the process."""

import asyncio
import contextlib
import logging
import sys
import threading
import time

from django.conf import settings

from config.outbound import transport
from config.outbound.loop import raise_open_file_limit
from config.telemetry import logs, tracing
from runs import catalogue, lifecycle, metrics
from runs.engine.contacts import Contacts
from runs.engine.heartbeat import Heartbeat
from runs.engine.loop import execute
from runs.engine.process import Process
from runs.engine.session import Interruption, Session, claim, flush_forever
from runs.llm.registry import preload
from runs.models import Run, RunStatus, Worker

logger = logging.getLogger(__name__)

# The time to hand runs over after the grace time. Both together are under 30 s, after which platforms kill.
CLOSE_SECONDS = 10.0
HAND_OVER_ROUNDS = 3
# How long a thread that computes for a tool can keep the interpreter from the event loop (docs/decisions/0018).
SWITCH_SECONDS = 0.001


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
        self.heartbeat = Heartbeat(
            self.process, self.tasks.keys(), offer=self.offer, cancel=self._request_cancel, drop_all=self._drop_all
        )

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

    def _request_cancel(self, run_ids: list[str]) -> None:
        self.loop.call_soon_threadsafe(self._cancel, run_ids, Interruption.REQUESTED)

    def _drop_all(self) -> None:
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
