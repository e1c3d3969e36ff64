"""What is measured of credits. The ledger is the truth; this is for watching."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from django.db import transaction

from config.telemetry.metrics import Counter, Gauge

MICRO = 1_000_000

spent = Counter("credits_spent", "Credits captured for tools and used by models.", ["tool"])


def spend(tool_key: str | None, amount: int) -> None:
    """Count what a row spends, once it is committed. Refunds are not taken off: a counter only grows."""
    if amount:
        transaction.on_commit(partial(spent.inc, tool_key or "model", by=amount / MICRO), robust=True)


def gauges() -> Iterable[Gauge]:
    """None: sums over accounts would be heavy. The page learns here of what is counted above."""
    return ()
