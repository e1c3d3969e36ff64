"""Random sequences of all that happens to the calls of one turn: parked ones beside ones that work, one for the
caller's app, a waitpoint, crashes, callbacks and cancels in any order.

A worker is simulated: its transitions are the engine's, and it reads the run again where the engine does.
"""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from config.kernel import clock
from config.kernel.ids import new_id
from config.kernel.money import MICRO
from credits.models import LedgerEntry
from runs import lifecycle
from runs.engine import history, session
from runs.lifecycle import calls as call_transitions
from runs.models import FINAL_INVOCATION_STATUSES, FINAL_RUN_STATUSES, Run, RunEvent, ToolInvocation, Turn, Waitpoint
from runs.tools.base import Parked, ToolFailure, ToolResult, tool_error
from runs.tools.questions import Dialogue, Question
from tests.factories import UserFactory, force_update, session_client
from tests.tiers import examples

WORKERS = ("wrk_a", "wrk_b")
# Name, type, price, seconds, whether it may be repeated.
CALLS = [
    ("film", "http", 2 * MICRO, 600, False),
    ("film_again", "http", 2 * MICRO, 600, True),
    ("book", "http", MICRO, None, False),
    ("research", "mcp", 2 * MICRO, 600, False),
    ("show_map", "client", 0, None, False),
    ("ask_user", "builtin", 0, None, True),
]
AT = st.integers(0, len(CALLS) - 1)
FATES = st.sampled_from(["done", "done", "done", "rolled back", "answer lost"])


class KilledHere(Exception):
    pass


def asked(call: ToolInvocation) -> bool:
    """Whether the server of an open call's task asks the user."""
    return call.node_type == "mcp" and Dialogue.from_text(call.remote_task).question is not None


class Parking(RuleBasedStateMachine):
    @initialize(parked=st.booleans())
    def start(self, parked: bool) -> None:
        self.client = session_client(UserFactory())
        chat = self.client.post("/api/v1/chats", {}, format="json").json()["id"]
        self.run_id = self.client.post(f"/api/v1/chats/{chat}/runs", {"message": "x"}, format="json").json()["id"]
        self.worker: tuple[Run, history.Journal] | None = None
        # The outcomes that were accepted, by call.
        self.accepted: dict[str, str] = {}
        # Whether a server has asked the user since the run was claimed: its call may have ended before the run resumes.
        self.was_asked = False
        self.claim("wrk_a")
        assert self.worker is not None
        run, recorded = self.worker
        now = clock.now()
        turn = Turn(run=run, index=1, model="demo", tool_calls=[], started_at=now, finished_at=now)
        calls = [
            ToolInvocation(
                id=new_id("inv"),
                run=run,
                turn_index=1,
                call_index=index,
                tool_call_id=f"call_{index}",
                name=name,
                node_type=kind,
                credit_estimate=price,
                park_seconds=seconds,
                repeatable=repeatable,
                created_at=now,
                updated_at=now,
            )
            for index, (name, kind, price, seconds, repeatable) in enumerate(CALLS, 1)
        ]
        moved = lifecycle.record_turn(run, turn, calls, content="", delta="", charge=None, ready=calls[:2])
        recorded.take(moved)
        self.worker = moved.run, recorded
        if parked:
            self.rest("done")
            self.answer()
            self.rest("done")

    # --- the worker --------------------------------------------------------------------------------------------------

    @rule(worker=st.sampled_from(WORKERS))
    def claim(self, worker: str) -> None:
        if self.worker is None and (run := lifecycle.claim(self.run_id, worker)):
            self.worker = run, history.read_journal(run)
            self.was_asked = False

    @rule(at=AT, fate=FATES)
    def dispatch(self, at: int, fate: str) -> None:
        if call := self.known(at, "PENDING"):
            answered = Waitpoint.objects.filter(invocation=call, status="COMPLETED").exists()
            if call.name != "ask_user" or answered:
                self.step(fate, lifecycle.dispatch_calls, [call])

    @rule(at=AT, fate=FATES, seconds=st.sampled_from([None, 60]), message=st.sampled_from(["", "In line"]))
    def park(self, at: int, fate: str, seconds: int | None, message: str) -> None:
        call = self.known(at, "DISPATCHING")
        if call and call.park_seconds and not call.awaiting:
            is_task = call.node_type == "mcp"
            task = {"remote_task": Dialogue("t-1").to_text(), "contact_in_seconds": 1.0} if is_task else {}
            self.step(fate, lifecycle.park_call, call, Parked(message, expires_in_seconds=seconds, **task))

    @rule(at=AT, fate=FATES, succeeds=st.booleans())
    def record(self, at: int, fate: str, succeeds: bool) -> None:
        call = self.known(at, "DISPATCHING")
        if call is None or call.awaiting:
            return
        result = ToolResult("by the worker", credit_used=MICRO // 2)
        if self.step(fate, lifecycle.record_call_result, call, result if succeeds else ToolFailure("TOOL_ERROR", "no")):
            self.accepted[call.id] = "by the worker" if succeeds else ""

    @rule(fate=FATES)
    def rest(self, fate: str) -> None:
        """What ``runs.engine.calls.resume`` does: all that can be done at once, and then it asks or parks the run."""
        self.claim("wrk_a")
        for at in range(len(CALLS)):
            self.dispatch(at, "done")
            self.park(at, "done", None, "")
            self.record(at, "done", True)
        if any(call.status == "PENDING" and call.name != "ask_user" for call in self.open()):
            return
        if any(call.status == "DISPATCHING" and not call.awaiting for call in self.open()):
            return
        pending = [call for call in self.open() if call.status == "PENDING"]
        if pending and not Waitpoint.objects.filter(invocation=pending[0]).exists():
            self.step(fate, lifecycle.open_waitpoint, pending[0], "CLARIFICATION", {"question": "Which?"})
        elif not pending and (asking := [call for call in self.open() if asked(call)]):
            number = Dialogue.from_text(asking[0].remote_task).answered
            payload = {"question": "Who?", "toolInvocationId": asking[0].id, "schema": {"type": "object"}}
            self.step(fate, lifecycle.open_waitpoint, asking[0], "CLARIFICATION", payload, question=number)
        elif self.open() and not pending:
            self.step(fate, lifecycle.park_run)
        if self.worker and (self.worker[0].parked or self.worker[0].status != "running"):
            self.worker = None

    @rule(released=st.booleans())
    def crash(self, released: bool) -> None:
        self.worker = None
        run = Run.objects.get(pk=self.run_id)
        if released and run.worker_id:
            lifecycle.release_unexecuted(run.worker_id, (), lambda: False)

    # --- tools, the app, the user, time ------------------------------------------------------------------------------

    @rule(at=AT, text=st.sampled_from(["one", "two", ""]))
    def call_back(self, at: int, text: str) -> None:
        call = ToolInvocation.objects.get(run=self.run_id, call_index=at + 1)
        outcome = ToolResult(text, (), MICRO) if text else tool_error("no")
        if lifecycle.record_outcome(call, outcome)[1]:
            assert call.status == "DISPATCHING", "only an open call has an outcome"
            assert call.awaiting or call.park_seconds, "nobody else gives the outcome of a call that a worker makes"
            assert call.pk not in self.accepted, "the first outcome counts"
            self.accepted[call.pk] = text

    @rule(at=AT)
    def tell_progress(self, at: int) -> None:
        call = ToolInvocation.objects.get(run=self.run_id, call_index=at + 1)
        lifecycle.record_outcome(call, Parked(fraction=0.5, message="half"))

    @rule(says=st.sampled_from(["working", "asks", "asks", "done"]))
    def poll(self, says: str) -> None:
        """A task is asked for its outcome, or its server is told of its end."""
        rows = ToolInvocation.objects.filter(run=self.run_id, contact_at__isnull=False)
        rows.update(contact_at=clock.now())
        for call in lifecycle.take_contacts(list(rows.values_list("pk", flat=True))):
            known = Dialogue.from_text(call.remote_task) if call.node_type == "mcp" else Dialogue()
            if call.status != "DISPATCHING":
                lifecycle.record_contact(call, None)
            elif says == "done":
                self.call_back(call.call_index - 1, "one")
            else:
                self.was_asked |= says == "asks"
                questions = (Question(f"q{known.answered}", "Who?", {"type": "object"}),) if says == "asks" else ()
                task = replace(known, questions=questions, answers={}).to_text()
                lifecycle.record_contact(call, Parked(remote_task=task, contact_in_seconds=None if questions else 5.0))

    @rule(at=AT, often=st.integers(0, 4))
    def expire(self, at: int, often: int) -> None:
        if often:
            return
        rows = ToolInvocation.objects.filter(run=self.run_id, call_index=at + 1, awaiting__isnull=False)
        if call := rows.first():
            rows.update(expires_at=clock.now() - timedelta(seconds=1))
            assert call_transitions.expire_call(call.pk)
            self.accepted[call.pk] = ""

    @rule()
    def answer(self) -> None:
        if point := Waitpoint.objects.filter(run=self.run_id, status="PENDING").first():
            answer = {"data": {}} if "schema" in point.request_payload else {"answer": "blue"}
            lifecycle.answer_waitpoint(point.pk, answer)

    @rule(often=st.integers(0, 9))
    def cancel(self, often: int) -> None:
        if often == 0:
            lifecycle.request_cancel(self.run_id)

    # --- how the engine makes a transition ---------------------------------------------------------------------------

    def open(self) -> list[ToolInvocation]:
        return self.worker[1].open_calls if self.worker else []

    def known(self, at: int, status: str) -> ToolInvocation | None:
        """The call as the worker knows it, which may be behind the database."""
        return next((call for call in self.open() if call.call_index == at + 1 and call.status == status), None)

    def step(self, fate: str, transition: Any, *args: Any, **kwargs: Any) -> bool:
        assert self.worker is not None
        run, recorded = self.worker
        is_committed = False
        try:
            with transaction.atomic():
                moved = transition(run, *args, **kwargs)
                if fate == "rolled back":
                    raise KilledHere
            is_committed = True
            if fate == "answer lost":
                with transaction.atomic():
                    transition(run, *args, **kwargs)
                raise AssertionError("a repeated transition must find its own rows")
        except KilledHere:
            self.worker = None
            return False
        except lifecycle.LeaseLost:
            found = session.reload(run)
            self.worker = (found.run, found.journal) if found else None
            return is_committed
        recorded.take(moved)
        self.worker = moved.run, recorded
        return True

    # --- the laws ----------------------------------------------------------------------------------------------------

    @invariant()
    def the_laws_hold(self) -> None:
        if not hasattr(self, "run_id"):
            return
        run = Run.objects.get(pk=self.run_id)
        calls = list(ToolInvocation.objects.filter(run=run))
        left = [call for call in calls if call.status not in FINAL_INVOCATION_STATUSES]
        if run.status in FINAL_RUN_STATUSES:
            assert not left
        if run.parked and run.due_at is None:
            assert left, "a parked run waits for a call"
            assert all(call.awaiting for call in left), "a parked run has no work to do"
            assert not any(map(asked, left)), "a run resumes when a server asks the user"
        if run.parked and run.due_at is not None:
            assert self.was_asked or not left, "a run resumes when its last call has ended, or one asks the user"
        for call in calls:
            if call.id in self.accepted and call.status == "COMPLETED":
                assert call.result == self.accepted[call.id]
        spent = LedgerEntry.objects.filter(run_id=run.pk, type="CAPTURE").values_list("invocation_id", flat=True)
        assert sorted(spent) == sorted(call.pk for call in calls if call.status == "COMPLETED" and call.credit_estimate)
        begun = RunEvent.objects.filter(run=run, type="run.status", data__contains='"running"').count()
        resolved = Waitpoint.objects.filter(run=run).exclude(status="PENDING").count()
        assert begun <= 1 + resolved, "a run begins once, and again after each question"

    def teardown(self) -> None:
        """Whatever has happened, the run ends."""
        if not hasattr(self, "run_id"):
            return
        self.crash(True)
        force_update(ToolInvocation.objects.filter(awaiting__isnull=False), expires_at=clock.now())
        for call in ToolInvocation.objects.filter(awaiting__isnull=False):
            call_transitions.expire_call(call.pk)
        lifecycle.request_cancel(self.run_id)
        assert Run.objects.get(pk=self.run_id).status in FINAL_RUN_STATUSES
        assert list(lifecycle.violations(workers=False)) == []


@pytest.mark.django_db
def test_any_order_of_callbacks_results_answers_crashes_and_cancels_is_right():
    run_state_machine_as_test(
        Parking,
        settings=settings(
            max_examples=examples(10),
            stateful_step_count=40,
            deadline=None,
            # Shrinking would take longer than a test may.
            phases=[Phase.generate],
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
