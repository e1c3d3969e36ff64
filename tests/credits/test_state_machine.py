"""Random interleavings of every movement against a plain model of an account."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from config.api.errors import Conflict
from credits import ledger
from credits.models import LedgerEntry
from credits.reconcile import drift
from tests.credits.helpers import place, state, turn
from tests.factories import UserFactory

AMOUNTS = st.integers(0, 60)
RUNS = st.sampled_from(["run_a", "run_b", "run_c"])


class Credits(RuleBasedStateMachine):
    """The model: a balance, open holds by invocation, and what each run spent."""

    invocations: Bundle = Bundle("invocations")
    prefix = 0

    @initialize()
    def start(self) -> None:
        self.user: Any = UserFactory()
        Credits.prefix += 1
        self.balance = 100_000_000
        self.holds: dict[str, tuple[str, int]] = {}
        self.settled: set[str] = set()
        self.spent: dict[str, int] = {}
        self.turns: set[tuple[str, int]] = set()
        # In the order in which they were made: Hypothesis must be able to draw the same again.
        self.refundable: list[tuple[str, str, int]] = []
        self.grants: set[str] = set()
        ledger.adjust(self.user.pk, -self.balance + 100, reason="start small", staff=None)
        self.balance = 100
        self.number = 0

    def name(self, of: str) -> str:
        return f"{of}_{Credits.prefix}"

    def take(self, run: str, amount: int) -> None:
        self.balance -= amount
        self.spent[run] = self.spent.get(run, 0) + amount

    @property
    def available(self) -> int:
        return self.balance - sum(amount for _, amount in self.holds.values())

    @rule(cause=st.sampled_from("abcdef"), amount=st.integers(1, 60))
    def grant(self, cause: str, amount: int) -> None:
        ledger.grant(self.user.pk, amount, cause=f"{self.user.pk}:{cause}")
        if cause not in self.grants:
            self.grants.add(cause)
            self.balance += amount

    @rule(amount=st.integers(-30, 30).filter(bool))
    def adjust(self, amount: int) -> None:
        ledger.adjust(self.user.pk, amount, reason="r", staff=None)
        self.balance += amount

    @rule(target=invocations, run=RUNS, amount=AMOUNTS)
    def hold(self, run: str, amount: int) -> str:
        self.number += 1
        invocation = self.name(f"inv_{self.number}")
        if amount and amount > self.available:
            with pytest.raises(ledger.InsufficientCredits):
                place(self.user, amount, invocation=invocation, run=self.name(run))
        else:
            place(self.user, amount, invocation=invocation, run=self.name(run))
            if amount:
                self.holds[invocation] = (run, amount)
        return invocation

    @rule(invocation=invocations)
    def hold_again(self, invocation: str) -> None:
        if invocation in self.holds or invocation in self.settled:
            place(self.user, 1, invocation=invocation)

    @rule(invocation=invocations, amount=AMOUNTS)
    def capture(self, invocation: str, amount: int) -> None:
        run, held = self.holds.pop(invocation, ("", 0))
        expected = min(amount, held)
        assert ledger.capture(invocation, amount) == expected
        if held:
            self.settled.add(invocation)
        if expected:
            self.take(run, expected)
            row = LedgerEntry.objects.get(type="CAPTURE", invocation_id=invocation)
            self.refundable.append((row.pk, run, expected))

    @rule(invocation=invocations)
    def release(self, invocation: str) -> None:
        ledger.release(invocation)
        if self.holds.pop(invocation, None):
            self.settled.add(invocation)

    @rule(run=RUNS)
    def end_run(self, run: str) -> None:
        ended = {invocation: held for invocation, (of, held) in self.holds.items() if of == run}
        assert ledger.release_run(self.name(run)) == sum(ended.values())
        for invocation in ended:
            del self.holds[invocation]
            self.settled.add(invocation)

    @rule(run=RUNS, index=st.integers(1, 4), amount=AMOUNTS)
    def usage(self, run: str, index: int, amount: int) -> None:
        row = turn(self.user, amount, run=self.name(run), index=index)
        if (run, index) not in self.turns:
            self.turns.add((run, index))
            self.take(run, amount)
            self.refundable.append((row.pk, run, amount))

    @rule(data=st.data(), amount=st.integers(1, 40))
    def refund(self, data: st.DataObject, amount: int) -> None:
        if not self.refundable:
            return
        index = data.draw(st.integers(0, len(self.refundable) - 1))
        entry, run, left = self.refundable[index]
        if amount > left:
            with pytest.raises(Conflict):
                ledger.refund(entry, amount, reason="r", staff=None)
            return
        ledger.refund(entry, amount, reason="r", staff=None)
        self.refundable[index] = (entry, run, left - amount)
        self.take(run, -amount)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "user"):
            return
        assert state(self.user) == (self.balance, self.balance - self.available)

    def teardown(self) -> None:
        for run in ("run_a", "run_b", "run_c"):
            spent = self.spent.get(run, 0)
            held = sum(amount for of, amount in self.holds.values() if of == run)
            assert ledger.run_spent(self.name(run)) == spent
            assert ledger.run_held(self.name(run)) == held
            assert not ledger.would_exceed(self.name(run), spent + held + 1, 1)
            assert ledger.would_exceed(self.name(run), spent + held, 1)

        assert list(drift()) == []


@pytest.mark.django_db
def test_any_interleaving_agrees_with_the_model():
    run_state_machine_as_test(
        Credits,
        settings=settings(
            max_examples=25,
            stateful_step_count=30,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
