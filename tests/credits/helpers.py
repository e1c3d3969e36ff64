"""Helpers that create ledger rows; each call is a separate movement."""

from datetime import datetime
from itertools import count
from typing import Any

from django.contrib.auth import get_user_model
from django.db import transaction

from config.kernel import clock
from config.kernel.money import MICRO
from credits import ledger, sums
from credits.models import Account, LedgerEntry
from tests.factories import charge_turn

_numbers = count(1)


def clerk() -> Any:
    """The member of staff who makes corrections in tests. A separate user, so no tested account changes."""
    return get_user_model()._default_manager.get_or_create(username="clerk", defaults={"is_staff": True})[0]


def fund(user: Any, amount: int) -> None:
    """Adjust the available credits of a user to exactly ``amount``."""
    change = amount - ledger.account_for(user.pk).available
    if change:
        ledger.adjust(user.pk, change, reason="for the test", staff=clerk())


def place(
    user: Any,
    amount: int,
    *,
    invocation: str | None = None,
    run: str = "run_1",
    chat: str = "chat_1",
    tool: str = "draw",
) -> str:
    """Hold ``amount``; returns the invocation's id."""
    invocation = invocation or f"inv_{next(_numbers)}"
    ledger.hold(
        user.pk, amount, invocation_id=invocation, tool_key=tool, chat_id=chat, run_id=run, price={"perCall": amount}
    )
    return invocation


def release_run(run_id: str) -> int:
    """Release every open hold of the run. Returns how much this call released."""
    with transaction.atomic():
        return sum(hold.amount for hold in sums.open_holds(run_id) if ledger.settle(hold, 0))


def spend(user: Any, amount: int, *, run: str = "run_1", chat: str = "chat_1", tool: str = "draw") -> LedgerEntry:
    """Hold and capture ``amount``; returns the CAPTURE row."""
    invocation = place(user, amount, run=run, chat=chat, tool=tool)
    ledger.capture(invocation, amount)
    return LedgerEntry.objects.get(type="CAPTURE", invocation_id=invocation)


def turn(user: Any, amount: int, *, run: str = "run_1", chat: str = "chat_1", index: int | None = None) -> LedgerEntry:
    """Hold and charge a model turn; returns the USAGE row."""
    return charge_turn(user, amount, run=run, chat=chat, index=index or next(_numbers))


def state(user: Any) -> tuple[int, int]:
    """(balance, held)"""
    account = Account.objects.get(pk=user.pk)
    return account.balance, account.held


def rows(user: Any) -> list[tuple[str, int]]:
    """(type, amount) of each row in order of creation, without the sign-up grant and the rows of ``fund``."""
    entries = LedgerEntry.objects.filter(account_id=user.pk).exclude(cause=f"signup:{user.pk}")
    entries = entries.exclude(reason="for the test").order_by("created_at", "type")
    return list(entries.values_list("type", "amount"))


class Clock:
    """Replaces the clock of the service; set ``now`` to change the time."""

    def __init__(self, now: datetime) -> None:
        self.now = now

    def __call__(self) -> datetime:
        return self.now


def stop_clock(monkeypatch: Any, now: datetime) -> Clock:
    stopped = Clock(now)
    monkeypatch.setattr(clock, "now", stopped)
    return stopped


CREDIT = MICRO
