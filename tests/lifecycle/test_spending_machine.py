"""Random sequences of all that happens to the turns of runs: the three laws of spending hold after each step.

Workers are simulated: their transitions are the engine's, and a crash forgets what a worker has in memory. Each crash
point is between two transitions; a crash within one rolls it back.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from django.db import IntegrityError, transaction
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from config.kernel import clock
from config.kernel.errors import Conflict
from config.kernel.money import MICRO
from credits import ledger
from credits.grants import expire_grants
from credits.models import SETTLEMENTS, SPENDING, Account, LedgerEntry
from runs import lifecycle
from runs.catalogue.definitions import Server
from runs.engine.requests import Allowance, Short, allow, charge_of, partial_charge
from runs.events import join_text
from runs.lifecycle import RunFailed
from runs.llm.base import ModelRequest, Usage, UserMessage
from runs.models import FINAL_RUN_STATUSES, LIVE_RUN_STATUSES, ModelAttempt, Run, RunStatus, ToolInvocation, Turn
from runs.tools.base import ToolFailure, ToolResult
from tests.factories import UserFactory, session_client
from tests.llm.helpers import model_of
from tests.tiers import examples

WORKERS = ("wrk_a", "wrk_b")
PRICES = {"cheap": (500_000, 1_500_000), "dear": (2_000_000, 6_000_000), "free": (0, 0)}
RUNS_MAX = 3
RUNS = st.integers(0, RUNS_MAX - 1)
TOKENS = st.sampled_from([0, 1, 50, 400, 1000, 5000, 10**9])
# What becomes of a transition: its worker dies within it, or the answer to its commit is lost and it is repeated.
FATES = st.sampled_from(["done", "done", "done", "rolled back", "answer lost"])


class KilledHere(Exception):
    pass


@dataclass
class Worker:
    """What a worker has in memory of a run that it executes."""

    run: Run
    turns: list[Turn] = field(default_factory=list)
    attempts: int = 0
    requests: int = 0
    request: ModelRequest | None = None
    allowance: Allowance | None = None
    # Characters that the provider sent and those that are recorded.
    sent: int = 0
    calls: tuple[ToolInvocation, ...] = ()

    def partial_charge(self) -> lifecycle.Charge | None:
        return partial_charge(self.request, self.allowance) if self.request and self.allowance else None


class Spending(RuleBasedStateMachine):
    @initialize(credits=st.sampled_from([3, 10, 50]), budget=st.sampled_from([None, 2.5, 4]))
    def start(self, credits: int, budget: float | None) -> None:
        self.user: Any = UserFactory()
        self.clerk: Any = UserFactory(is_staff=True)
        self.client = session_client(self.user)
        ledger.adjust(
            self.user.pk, credits * MICRO - ledger.account_for(self.user.pk).available, reason="r", staff=self.clerk
        )
        self.runs: list[str] = []
        self.workers: dict[str, Worker] = {}
        self.floor = 0
        # Holds under which text was recorded.
        self.used: set[str] = set()
        # Of the runs that steps need; users also start others.
        self.budget = budget
        self.start_run(budget)

    # --- users and staff ---------------------------------------------------------------------------------------------

    @rule(budget=st.sampled_from([None, 0.7, 1, 2.5, 30]))
    def start_run(self, budget: float | None) -> None:
        if Run.objects.filter(pk__in=self.runs, status__in=LIVE_RUN_STATUSES).count() >= RUNS_MAX:
            return
        chat = self.client.post("/api/v1/chats", {}, format="json").json()["id"]
        body = {"message": "Hello"} | ({"maxCredits": budget} if budget else {})
        answer = self.client.post(f"/api/v1/chats/{chat}/runs", body, format="json")
        if answer.status_code == 201:
            self.runs.append(answer.json()["id"])
        else:
            assert (answer.status_code, ledger.account_for(self.user.pk).available <= 0) == (402, True)

    @rule(at=RUNS)
    def cancel(self, at: int) -> None:
        if run := self.run(at):
            lifecycle.request_cancel(run.pk)

    @rule(amount=st.integers(-3 * MICRO, 3 * MICRO).filter(bool))
    def adjust(self, amount: int) -> None:
        ledger.adjust(self.user.pk, amount, reason="r", staff=self.clerk)
        self.floor = min(0, ledger.account_for(self.user.pk).available)

    @rule(data=st.data(), part=st.integers(1, 3))
    def refund(self, data: st.DataObject, part: int) -> None:
        rows = LedgerEntry.objects.filter(account_id=self.user.pk, type__in=["USAGE", "CAPTURE"], amount__gt=0)
        if found := list(rows.order_by("created_at", "id")):
            row = found[data.draw(st.integers(0, len(found) - 1))]
            try:
                ledger.refund(row.pk, max(1, row.amount // part), reason="r", staff=self.clerk)
            except Conflict:
                assert LedgerEntry.objects.filter(against=row, type="REFUND").exists()

    @rule(amount=st.integers(1, 2 * MICRO), seconds=st.sampled_from([0, 0, 3600]))
    def grant_for_a_while(self, amount: int, seconds: int) -> None:
        cause = f"{self.user.pk}:{LedgerEntry.objects.count()}"
        ledger.grant(self.user.pk, amount, cause=cause, expires_at=clock.now() + timedelta(seconds=seconds))
        sum(expire_grants())

    # --- workers -----------------------------------------------------------------------------------------------------

    @rule(at=RUNS, worker=st.sampled_from(WORKERS))
    def claim(self, at: int, worker: str) -> None:
        run = self.run(at)
        if run and run.pk not in self.workers and (claimed := lifecycle.claim(run.pk, worker)):
            self.load(claimed)

    @rule(at=RUNS, model=st.sampled_from(list(PRICES)), fate=FATES)
    def ask(self, at: int, model: str, fate: str) -> None:
        worker = self.worker(at)
        if worker and not worker.request and not worker.calls:
            self.begin_request(worker, model, fate)

    def begin_request(self, worker: Worker, model: str, fate: str) -> None:
        price_in, price_out = PRICES[model]
        prices = dict.fromkeys(("price_in", "price_cached_in", "price_cache_write"), price_in)
        definition = model_of(
            Server(model, "openai"), name=model, price_out=price_out, max_output_tokens=1000, **prices
        )
        request = ModelRequest(definition, (UserMessage("Hello"),), (), worker.run.chat_id, 1, 1000)
        worker.requests += 1
        step = (len(worker.turns) + 1, worker.requests)
        try:
            allowance = self.step(worker, fate, allow, worker.run, request, step, {})
        except Short as short:  # without a refusal, it waits for what other steps hold
            if short.refusal:
                self.finish(worker, "done", lifecycle.finish, RunFailed(short.refusal.code, short.refusal.message))
            return
        if allowance:
            assert allowance.output_tokens >= min(1000, 256)
            worker.request, worker.allowance, worker.sent = request, allowance, 0

    @rule(at=RUNS, count=st.integers(1, 3000), recorded=st.booleans())
    def stream(self, at: int, count: int, recorded: bool) -> None:
        worker = self.asking_worker(at)
        if worker is None or worker.request is None or worker.allowance is None:
            return
        worker.sent += count
        input_tokens, sent = 600, worker
        worker.request.progress.usage = lambda: Usage(input_tokens, max(1, sent.sent // 4))
        if recorded:
            if worker.allowance.hold is not None:
                self.used.add(worker.allowance.hold.pk)
            worker.run = lifecycle.append_text([(worker.run, "x" * count)])[worker.run.pk]

    @rule(at=RUNS, tokens_in=TOKENS, tokens_out=TOKENS, calls=st.sampled_from([0, 0, 1, 2]), fate=FATES)
    def answer(self, at: int, tokens_in: int, tokens_out: int, calls: int, fate: str) -> None:
        """The model answers, with any counts."""
        worker = self.asking_worker(at)
        if worker is None or worker.request is None or worker.allowance is None:
            return
        # The adapters estimate the tokens of a text whose provider counts none.
        tokens_out = max(tokens_out, min(worker.sent, 1))
        usage = Usage(tokens_in, tokens_out, cached_tokens=tokens_in // 3)
        charge = charge_of(worker.request.model, usage, worker.allowance.hold)
        now = clock.now()
        turn = Turn(
            run=worker.run,
            index=len(worker.turns) + 1,
            model=worker.request.model.name,
            text="x" * worker.sent,
            input_tokens=tokens_in,
            output_tokens=tokens_out,
            cached_tokens=tokens_in // 3,
            held=worker.allowance.hold.amount if worker.allowance.hold else 0,
            cost=charge.charged if charge else 0,
            started_at=now,
            finished_at=now,
        )
        if not calls:
            self.finish(worker, fate, lifecycle.complete, turn, content="x", charge=charge)
            return
        new = [self.call(worker.run, turn.index, number) for number in range(1, calls + 1)]
        text = {"content": "x", "delta": ""}
        done = self.step(worker, fate, lifecycle.record_turn, worker.run, turn, new, charge=charge, ready=new, **text)
        if done:
            worker.turns.append(turn)
            worker.request, worker.attempts = None, 0
            worker.calls = tuple(call for call in done.calls if call.status == "DISPATCHING")

    @rule(at=RUNS, calls=st.sampled_from([0, 1, 2, 2]))
    def take_turn(self, at: int, calls: int) -> None:
        """A turn without faults: with these, runs get further than their first request."""
        self.answer(at=at, tokens_in=400, tokens_out=50, calls=calls, fate="done")

    @staticmethod
    def call(run: Run, turn_index: int, number: int) -> ToolInvocation:
        return ToolInvocation(
            run=run,
            turn_index=turn_index,
            call_index=number,
            tool_call_id=f"call_{turn_index}_{number}",
            name="calculate",
            node_type="builtin",
            credit_estimate=300_000,
            created_at=clock.now(),
            updated_at=clock.now(),
        )

    @rule(at=RUNS, used=st.sampled_from([0, 100_000, 300_000]), fails=st.booleans(), fate=FATES)
    def end_call(self, at: int, used: int, fails: bool, fate: str) -> None:
        worker = self.worker(at)
        if worker is None or not worker.calls:
            return
        call, *rest = worker.calls
        outcome = ToolFailure("TOOL_ERROR", "no") if fails else ToolResult("", credit_used=used)
        if self.step(worker, fate, lifecycle.record_call_result, worker.run, call, outcome):
            worker.calls = tuple(rest)

    @rule(at=RUNS, again=st.booleans(), fate=FATES)
    def request_fails(self, at: int, again: bool, fate: str) -> None:
        """It is made again, perhaps to a fallback, or the run fails."""
        worker = self.asking_worker(at)
        if worker is None or worker.request is None:
            return
        now = clock.now()
        attempt = ModelAttempt(
            run=worker.run,
            turn_index=len(worker.turns) + 1,
            number=worker.attempts + 1,
            model="cheap",
            provider="p",
            reason="connection_lost",
            next_model="dear" if again else "",
            next_at=now if again else None,
            started_at=now,
            finished_at=now,
        )
        charge = worker.partial_charge()
        if not again:
            self.finish(worker, fate, lifecycle.finish, RunFailed("MODEL_ERROR", "no", attempt), partial=charge)
        elif self.step(worker, fate, lifecycle.end_request, worker.run, attempt, self.text(worker), charge):
            worker.request, worker.attempts = None, worker.attempts + 1

    @rule(at=RUNS, fate=FATES, how=st.sampled_from(["cancel", "fail", "hand over", "hand over"]))
    def end(self, at: int, fate: str, how: str) -> None:
        worker = self.worker(at)
        if worker is None:
            return
        if how == "hand over":
            if worker.request is None and self.step(worker, fate, lifecycle.hand_over, worker.run):
                del self.workers[worker.run.pk]
        elif how == "cancel":
            self.finish(worker, fate, lifecycle.finish, partial=worker.partial_charge())
        else:
            self.finish(
                worker, fate, lifecycle.finish, RunFailed("RUN_TIMEOUT", "late"), partial=worker.partial_charge()
            )

    @rule(at=RUNS, released=st.booleans())
    def crash(self, at: int, released: bool) -> None:
        """The worker forgets the run. The run is released, or the same worker claims it again."""
        run = self.run(at)
        if run and self.workers.pop(run.pk, None) and released and run.worker_id:
            lifecycle.release_unexecuted(run.worker_id, self.workers, lambda: False)

    # --- how the engine makes a transition ---------------------------------------------------------------------------

    def run(self, at: int) -> Run | None:
        """One of the runs that live; a new one if none does."""
        live = Run.objects.filter(pk__in=self.runs, status__in=LIVE_RUN_STATUSES).order_by("pk")
        if not live.exists():
            self.start_run(self.budget)
        return live[at % len(live)] if live.exists() else None

    def worker(self, at: int) -> Worker | None:
        """The worker of a run, which claims the run first if it has none."""
        run = self.run(at)
        if run and run.pk not in self.workers and (claimed := lifecycle.claim(run.pk, run.worker_id or WORKERS[0])):
            self.load(claimed)
        return self.workers.get(run.pk) if run else None

    def asking_worker(self, at: int) -> Worker | None:
        """``worker``, with a request to a model under way; None if it has calls to make first."""
        worker = self.worker(at)
        if worker and not worker.request and not worker.calls:
            self.begin_request(worker, "cheap", "done")
        return worker if worker and worker.request else None

    def load(self, run: Run) -> Worker:
        worker = self.workers.setdefault(run.pk, Worker(run))
        worker.run, worker.turns = run, list(Turn.objects.filter(run=run).order_by("index"))
        worker.attempts = ModelAttempt.objects.filter(run=run, turn_index=len(worker.turns) + 1).count()
        open_calls = ToolInvocation.objects.filter(run=run, status="DISPATCHING").order_by("call_index")
        worker.request, worker.calls = None, tuple(open_calls)
        return worker

    @staticmethod
    def text(worker: Worker) -> str:
        return join_text(turn.text for turn in worker.turns)

    def step(self, worker: Worker, fate: str, transition: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make a transition; None if the worker died in it, or had to read the run again."""
        make = partial(transition, *args, **kwargs)
        try:
            with transaction.atomic():
                moved = make()
                if fate == "rolled back":
                    raise KilledHere
            if fate == "answer lost":
                with transaction.atomic():
                    moved = make()
        except KilledHere:
            self.workers.pop(worker.run.pk, None)
            return None
        except (lifecycle.LeaseLost, IntegrityError):
            self.reload(worker)
            return None
        if isinstance(moved, lifecycle.Moved):
            worker.run = moved.run
        return moved

    def reload(self, worker: Worker) -> None:
        charge = worker.partial_charge()
        lease = {"lease_token": worker.run.lease_token, "worker_id": worker.run.worker_id}
        run = Run.objects.filter(pk=worker.run.pk, status=RunStatus.RUNNING, **lease).first()
        if run is None:
            self.workers.pop(worker.run.pk, None)
            return
        self.load(run)
        if not worker.calls:
            worker.run = lifecycle.end_request(run, None, self.text(worker), charge).run

    def finish(self, worker: Worker, fate: str, transition: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        if self.step(worker, fate, transition, worker.run, *args, delta="", **kwargs):
            self.workers.pop(worker.run.pk, None)

    # --- the laws ----------------------------------------------------------------------------------------------------

    @invariant()
    def the_laws_hold(self) -> None:
        if not hasattr(self, "user"):
            return
        account = Account.objects.get(pk=self.user.pk)
        assert account.available >= self.floor, "only staff may take the available credits below zero"
        self.floor = min(0, account.available)
        # A query for each law and row would take most of the test's time.
        rows = {row.pk: row for row in LedgerEntry.objects.filter(account_id=self.user.pk)}
        settled = {row.against_id for row in rows.values() if row.type in SETTLEMENTS}
        held = [row for row in rows.values() if row.type == "HOLD" and row.pk not in settled]
        used: Counter[str | None] = Counter()
        costs, charged = defaultdict(list), set()
        for row in rows.values():
            if row in held:
                used[row.run_id] += row.amount
            if row.type in SPENDING:
                used[row.run_id] += -row.amount if row.type == "REFUND" else row.amount
            if row.type == "USAGE" and row.amount:
                charged.add(row.against_id)
            if row.type == "USAGE" and "partial" not in row.price:
                costs[row.run_id, rows[row.against_id].price["turn"]].append(row.amount)
        for run in Run.objects.filter(pk__in=self.runs):
            assert run.max_credits is None or used[run.pk] <= run.max_credits, "a run may use more than its maxCredits"
            if run.status in FINAL_RUN_STATUSES:
                assert run.pk not in {row.run_id for row in held}, "a run that has ended holds nothing"
        for turn in Turn.objects.filter(run_id__in=self.runs, held__gt=0):
            assert costs[turn.run_id, turn.index] == [turn.cost], "a finished turn has its USAGE row"
        assert self.used & settled <= charged, "recorded text is charged"

    def teardown(self) -> None:
        assert lifecycle.violations() == []


@pytest.mark.django_db
def test_the_laws_hold_after_each_step_of_any_sequence(monkeypatch):
    # The workers have no rows: on a busy machine, no run of an earlier example may count as one that nobody took over.
    monkeypatch.setattr("django.conf.settings.RUN_LEASE_SECONDS", 600)
    run_state_machine_as_test(
        Spending,
        settings=settings(
            max_examples=examples(40),
            stateful_step_count=40,
            deadline=None,
            # Shrinking would take longer than a test may.
            phases=[Phase.generate],
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
