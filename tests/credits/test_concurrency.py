"""Concurrent movements of one account: no overdraft, no double movement, exact sums."""

import contextlib
import random
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.db import IntegrityError, connection, transaction

from config.kernel.errors import Conflict
from credits import ledger
from credits.models import Account, LedgerEntry
from credits.reconcile import drift
from tests.credits.helpers import clerk, fund, place, release_run, spend, state, turn
from tests.factories import UserFactory

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def threads() -> int:
    """SQLite has one writer at a time, so that more threads only wait for longer."""
    return 16 if connection.vendor == "postgresql" else 4


def side_by_side(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Call ``work(0)`` … ``work(count - 1)``, each in its own thread and connection.

    Returns the results or exceptions.
    """
    start = threading.Barrier(count)
    results: list[Any] = [None] * count

    def run(index: int) -> None:
        try:
            connection.ensure_connection()
            start.wait()
            results[index] = work(index)
        except Exception as error:
            results[index] = error
        finally:
            connection.close()

    workers = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return results


def locked(user: Any, move: Callable[[], Any]) -> Any:
    """Move credits of a run as the run's owner does: under a lock that no other movement of the run holds."""
    with transaction.atomic():
        get_user_model()._default_manager.select_for_update().get(pk=user.pk)
        return move()


def test_holds_never_overdraw(threads):
    user = UserFactory()
    fund(user, 50)

    def hold(index: int) -> int:
        placed = 0
        for _ in range(10):
            try:
                place(user, 2)
                placed += 2
            except ledger.InsufficientCredits:
                pass
        return placed

    assert sum(side_by_side(threads, hold)) == 50
    assert state(user) == (50, 50)
    assert list(drift()) == []


def test_every_sum_is_exact(threads):
    user = UserFactory()
    fund(user, 500)

    def trade(index: int) -> tuple[int, int]:
        """Returns the changes of (balance, held)."""
        luck = random.Random(index)
        balance = held = 0
        for _ in range(15):
            try:
                amount = luck.randint(1, 60)
                invocation = place(user, amount, run=f"run_{index}")
            except ledger.InsufficientCredits:
                ledger.grant(user.pk, 25, cause=f"top-up:{luck.random()}")
                balance += 25
                continue
            fate = luck.randrange(4)
            if fate == 0:
                cost = luck.randint(0, amount + 5)
                assert ledger.capture(invocation, cost)
                balance -= min(cost, amount)
            elif fate == 1:
                ledger.capture(invocation, 0)
            elif fate == 2:
                spent = luck.randint(0, 3)
                with contextlib.suppress(ledger.InsufficientCredits):
                    turn(user, spent, run=f"run_{index}")
                    balance -= spent
                held += amount
            else:
                held -= release_run(f"run_{index}") - amount
        return balance, held

    results = side_by_side(threads, trade)
    assert state(user) == (500 + sum(balance for balance, _ in results), sum(held for _, held in results))
    assert list(drift()) == []


def test_concurrent_movements_with_one_cause_move_once(threads):
    user = UserFactory()
    fund(user, 100)
    granted = side_by_side(threads, lambda _: ledger.grant(user.pk, 7, cause="order:1").pk)
    assert len(set(granted)) == 1
    # The second call returns the result of the first and no error.
    places = side_by_side(threads, lambda _: locked(user, lambda: place(user, 5, invocation="inv_same")))
    assert set(places) == {"inv_same"}
    turns = side_by_side(threads, lambda _: locked(user, lambda: turn(user, 3, index=1)))
    assert len({row.pk for row in turns}) == 1
    assert state(user) == (100 + 7 - 3, 5)
    assert list(drift()) == []


def test_a_movement_of_a_run_without_its_lock_happens_once_or_fails(threads):
    user = UserFactory()
    fund(user, 100)
    for number in range(5):
        invocation = f"inv_{number}"
        results = side_by_side(threads, lambda _, invocation=invocation: place(user, 5, invocation=invocation))
        assert invocation in results
        assert all(result == invocation or isinstance(result, IntegrityError) for result in results)
    assert state(user) == (100, 25)
    assert list(drift()) == []


def test_only_one_of_many_settlements_of_a_hold_succeeds(threads):
    user = UserFactory()
    fund(user, 1000)
    place(user, 500)  # enough held credits for a wrong second settlement
    for _ in range(5):
        before, _ = state(user)
        invocation = place(user, 8)

        def settle(index: int, invocation: str = invocation) -> bool:
            move = partial(ledger.capture, invocation, 3 if index % 2 else 0)
            return locked(user, move)

        settled = side_by_side(threads, settle)
        assert sum(settled) == 1
        assert state(user) == (before - 3 * (settled.index(True) % 2), 500)
    assert list(drift()) == []


def every_movement(user: Any, key: str) -> tuple[list[Any], list[Any], tuple[int, int]]:
    """Makes each kind of movement. Returns the results of the calls, the rows and the account."""
    fund(user, 100)
    calls = [place(user, 10, invocation=f"inv_{key}{number}", run=f"run_{key}", tool="draw") for number in range(6)]
    place(user, 10, invocation=calls[0])  # again
    results: list[Any] = [ledger.capture(calls[0], 4), ledger.capture(calls[0], 9), ledger.capture(calls[0], 0)]
    results += [ledger.capture(calls[1], 10), ledger.capture(calls[2], 12), ledger.capture(calls[3], 0)]
    results += [ledger.capture(calls[4], 0), ledger.capture(calls[4], 3), ledger.capture(f"inv_{key}none", 1)]
    try:
        place(user, 67, invocation=f"inv_{key}dear")  # available: 100 − 24 spent − 10 held = 66, so 1 is missing
    except ledger.InsufficientCredits as refusal:
        results.append(refusal.details)
    results += [release_run(f"run_{key}"), release_run(f"run_{key}")]
    for _ in range(2):
        turn(user, 3, run=f"run_{key}", index=1)
    spent = LedgerEntry.objects.filter(account_id=user.pk, type="CAPTURE").order_by("pk")
    for _ in range(2):
        ledger.refund(spent[0].pk, 4, reason="r", staff=clerk(), cause=f"refund:{key}")
        ledger.adjust(user.pk, -1, reason="r", staff=clerk(), cause=f"adjustment:{key}")
        ledger.grant(user.pk, 2, cause=f"grant:{key}")
    columns = ("type", "amount", "tool_key", "chat_id", "run_id", "invocation_id", "price", "reason", "against__type")
    found = LedgerEntry.objects.filter(account_id=user.pk).order_by("created_at", "type", "amount")
    entries = [
        tuple(value.replace(key, "") if isinstance(value, str) else value for value in entry)
        for entry in found.values_list(*columns)
    ]
    return results, entries, state(user)


def test_a_movement_has_the_same_effect_alone_and_in_a_transaction():
    alone = every_movement(UserFactory(), "alone")
    with transaction.atomic():
        within = every_movement(UserFactory(), "within")
    assert alone == within
    results, entries, account = alone
    refused = {"available": "0.000066", "topUpUrl": None}
    assert results == [True, False, False, True, True, True, True, False, False, refused, 10, 0]
    assert account == (100 - 24 - 3 + 4 - 1 + 2, 0)
    assert [entry[1:] for entry in entries if entry[0] == "CAPTURE"] == [
        (amount, "draw", "chat_1", "run_", f"inv_{number}", {"perCall": 10}, "", "HOLD")
        for number, amount in enumerate((4, 10, 10))
    ]
    assert sum(entry[1] for entry in entries if entry[0] == "RELEASE") == 60 - 24
    assert {entry[6] for entry in entries if entry[0] == "RELEASE"} == {None}
    assert list(drift()) == []


def test_a_settlement_keeps_the_balance_in_range(monkeypatch):
    user = UserFactory()
    fund(user, 5)
    invocation = place(user, 5)
    ledger.adjust(user.pk, -5, reason="r", staff=clerk())
    monkeypatch.setattr(ledger, "BALANCE_LIMIT", 4)
    with pytest.raises(RuntimeError):
        ledger.capture(invocation, 5)
    assert state(user) == (0, 5)
    monkeypatch.setattr(ledger, "BALANCE_LIMIT", 5)
    assert ledger.capture(invocation, 5)
    assert state(user) == (-5, 0)


def test_an_account_below_its_hold_pays_nothing_outside_a_transaction():
    user = UserFactory()
    fund(user, 100)
    invocation = place(user, 10)
    Account.objects.filter(pk=user.pk).update(held=9)
    with pytest.raises(RuntimeError, match="less than its open hold"):
        ledger.capture(invocation, 4)
    assert state(user) == (100, 9)


def test_concurrent_refunds_do_not_exceed_the_amount(threads):
    user = UserFactory()
    fund(user, 100)
    spent = spend(user, 10)
    results = side_by_side(threads, lambda _: ledger.refund(spent.pk, 4, reason="r", staff=clerk()))
    assert sum(isinstance(result, LedgerEntry) for result in results) == 2
    assert sum(isinstance(result, Conflict) for result in results) == threads - 2
    assert state(user) == (98, 0)


def test_concurrent_first_reads_create_one_account(threads):
    user = get_user_model().objects.bulk_create([UserFactory.build()])[0]
    available = side_by_side(threads, lambda _: ledger.account_for(user.pk).available)
    assert set(available) == {100_000_000}
    assert list(drift()) == []
