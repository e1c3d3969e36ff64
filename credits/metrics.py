"""The metrics of credits. They are for monitoring only: the ledger holds the exact amounts."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from django.db import transaction

from config.kernel.money import MICRO
from config.telemetry.metrics import Counter, Gauge

spent = Counter("credits_spent", "Credits captured for tools and used by models.", ["tool"])


turns_over_hold = Counter(
    "credits_turns_over_hold", "Model turns that cost more than their hold, up to which they were charged."
)


def over_hold() -> None:
    transaction.on_commit(turns_over_hold.inc, robust=True)


def spend(tool_key: str | None, amount: int) -> None:
    """Count spent micro-credits after the commit. Refunds are not subtracted: a counter only grows."""
    if amount:
        transaction.on_commit(partial(spent.inc, tool_key or "model", by=amount / MICRO), robust=True)


def gauges() -> Iterable[Gauge]:
    """No gauges: sums over all accounts are expensive. METRICS_SOURCES imports the counter above through this."""
    return ()
