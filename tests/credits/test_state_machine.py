"""Random sequences of all movements, compared with a simple model of an account."""

from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from config.kernel import clock
from config.kernel.errors import Conflict
from credits import ledger, sums
from credits.grants import expire_grants, unspent
from credits.models import LedgerEntry, PendingExpiry
from credits.reconcile import drift
from tests.credits.helpers import Clock, clerk, place, release_run, state, stop_clock, turn
from tests.factories import UserFactory
from tests.tiers import examples

AMOUNTS = st.integers(0, 60)
RUNS = st.sampled_from(["run_a", "run_b", "run_c"])


class KilledHere(Exception):
    pass


class Credits(RuleBasedStateMachine):
    """The model: credits that never expire, expiring grants, open holds by invocation, and each run's spending."""

    invocations: Bundle = Bundle("invocations")
    prefix = 0
    time: Clock

    @initialize()
    def start(self) -> None:
        self.user: Any = UserFactory()
        Credits.prefix += 1
        self.now = 0
        # Ids of expiring grants → (second of expiry, unspent amount), and all other credits, which may be negative.
        self.lots: dict[str, tuple[int, int]] = {}
        self.kept = 100
        self.holds: dict[str, tuple[str, int]] = {}
        self.settled: set[str] = set()
        self.spent: dict[str, int] = {}
        self.turns: set[tuple[str, int]] = set()
        # In order of creation: Hypothesis must be able to repeat its draws.
        self.refundable: list[tuple[str, str, int]] = []
        self.grants: set[str] = set()
        ledger.adjust(self.user.pk, 100 - 100_000_000, reason="start small", staff=clerk())
        self.number = 0
        self.begun = Credits.time.now
        self.tick()

    def name(self, of: str) -> str:
        return f"{of}_{Credits.prefix}"

    def tick(self, seconds: int = 1) -> None:
        """Later movements get later times, so their order is defined."""
        self.now += seconds
        Credits.time.now = self.begun + timedelta(seconds=self.now)

    def take(self, run: str, amount: int) -> None:
        self.spent[run] = self.spent.get(run, 0) + amount
        if amount < 0:
            self.kept -= amount
        else:
            self.spend(amount)

    def spend(self, amount: int) -> None:
        """Spend the grants that expire first, then the oldest, then credits that never expire."""
        for grant, (end, left) in sorted(self.lots.items(), key=lambda lot: lot[1][0]):
            used = min(left, amount)
            self.lots[grant] = (end, left - used)
            amount -= used
        self.kept -= amount

    @property
    def balance(self) -> int:
        return self.kept + sum(left for _, left in self.lots.values())

    @property
    def available(self) -> int:
        return self.balance - sum(amount for _, amount in self.holds.values())

    @rule(cause=st.sampled_from("abcdef"), amount=st.integers(1, 60))
    def grant(self, cause: str, amount: int) -> None:
        ledger.grant(self.user.pk, amount, cause=f"{self.user.pk}:{cause}")
        if cause not in self.grants:
            self.grants.add(cause)
            self.kept += amount
        self.tick()

    @rule(amount=st.integers(1, 60), seconds=st.integers(1, 30))
    def grant_for_a_while(self, amount: int, seconds: int) -> None:
        end = self.now + seconds
        grant = ledger.grant(
            self.user.pk, amount, cause=f"{self.user.pk}:{self.now}", expires_at=self.begun + timedelta(seconds=end)
        )
        paid = min(amount, max(0, -self.kept))
        self.kept += paid
        self.lots[grant.pk] = (end, amount - paid)
        self.tick()

    @rule(seconds=st.integers(0, 40))
    def expire(self, seconds: int) -> None:
        """Expire grants. Credits under an open hold are not taken back."""
        self.tick(seconds)
        sum(expire_grants())
        free = max(0, self.available)
        for grant, (end, left) in sorted(self.lots.items(), key=lambda lot: lot[1][0]):
            if end <= self.now:
                taken = min(left, free)
                free -= taken
                self.lots[grant] = (end, left - taken)
        self.tick()

    @rule(what=st.sampled_from(["grant", "hold", "settle", "usage", "refund", "expire"]), amount=st.integers(1, 60))
    def crash(self, what: str, amount: int) -> None:
        """A process dies during a transaction. The transaction must have no effect."""
        try:
            with transaction.atomic():
                if what == "grant":
                    ledger.grant(self.user.pk, amount, cause=f"{self.user.pk}:crash", expires_at=Credits.time.now)
                elif what == "hold" and amount <= self.available:
                    place(self.user, amount, invocation=self.name("inv_crash"))
                elif what == "settle":
                    for invocation in self.holds:
                        ledger.capture(invocation, amount)
                elif what == "usage" and amount <= self.available:
                    turn(self.user, amount, run=self.name("run_a"), index=99)
                elif what == "refund":
                    for entry, _, left in self.refundable:
                        if left:
                            ledger.refund(entry, left, reason="r", staff=clerk())
                elif what == "expire":
                    sum(expire_grants())
                raise KilledHere
        except KilledHere:
            pass

    @rule(amount=st.integers(-30, 30).filter(bool))
    def adjust(self, amount: int) -> None:
        ledger.adjust(self.user.pk, amount, reason="r", staff=clerk())
        if amount > 0:
            self.kept += amount
        else:
            self.spend(-amount)
        self.tick()

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
        assert ledger.capture(invocation, amount) == bool(held)
        if held:
            self.settled.add(invocation)
        if expected:
            self.take(run, expected)
            self.tick()
            row = LedgerEntry.objects.get(type="CAPTURE", invocation_id=invocation)
            self.refundable.append((row.pk, run, expected))

    @rule(invocation=invocations)
    def release(self, invocation: str) -> None:
        ledger.capture(invocation, 0)
        if self.holds.pop(invocation, None):
            self.settled.add(invocation)

    @rule(run=RUNS)
    def end_run(self, run: str) -> None:
        ended = {invocation: held for invocation, (of, held) in self.holds.items() if of == run}
        assert release_run(self.name(run)) == sum(ended.values())
        for invocation in ended:
            del self.holds[invocation]
            self.settled.add(invocation)

    @rule(run=RUNS, index=st.integers(1, 4), amount=AMOUNTS)
    def usage(self, run: str, index: int, amount: int) -> None:
        if (run, index) not in self.turns and max(1, amount) > self.available:
            with pytest.raises(ledger.InsufficientCredits):
                turn(self.user, amount, run=self.name(run), index=index)
            return
        row = turn(self.user, amount, run=self.name(run), index=index)
        if (run, index) not in self.turns:
            self.turns.add((run, index))
            self.take(run, amount)
            self.refundable.append((row.pk, run, amount))
        self.tick()

    @rule(data=st.data(), amount=st.integers(1, 40))
    def refund(self, data: st.DataObject, amount: int) -> None:
        if not self.refundable:
            return
        index = data.draw(st.integers(0, len(self.refundable) - 1))
        entry, run, left = self.refundable[index]
        if amount > left:
            with pytest.raises(Conflict):
                ledger.refund(entry, amount, reason="r", staff=clerk())
            return
        ledger.refund(entry, amount, reason="r", staff=clerk())
        self.refundable[index] = (entry, run, left - amount)
        self.take(run, -amount)
        self.tick()

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "user"):
            return
        assert state(self.user) == (self.balance, self.balance - self.available)

    def teardown(self) -> None:
        for run in ("run_a", "run_b", "run_c"):
            spent = self.spent.get(run, 0)
            held = sum(amount for of, amount in self.holds.values() if of == run)
            assert sums.committed(self.name(run)) == spent + held

        left = {grant: amount for grant, amount in unspent(self.user.pk).items() if amount}
        assert left == {grant: amount for grant, (_, amount) in self.lots.items() if amount}
        assert list(drift()) == []
        # The next example starts at the same time.
        PendingExpiry.objects.all().delete()


@pytest.mark.django_db
def test_any_sequence_agrees_with_the_model(monkeypatch):
    Credits.time = stop_clock(monkeypatch, clock.now())
    run_state_machine_as_test(
        Credits,
        settings=settings(
            max_examples=examples(25),
            stateful_step_count=30,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
