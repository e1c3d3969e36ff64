"""What is measured of credits. The ledger is the truth; this is for watching."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from django.db import transaction

from config.api.metrics import Counter, Gauge
from credits.models import EntryType, LedgerEntry

MICRO = 1_000_000

spent = Counter("credits_spent", "Credits captured for tools and used by models.", ["tool"])


def posted(rows: Sequence[LedgerEntry]) -> None:
    """Count what these rows spend, once they are committed. Refunds are not taken off: a counter only grows."""
    for row in rows:
        if row.type in (EntryType.CAPTURE, EntryType.USAGE) and row.amount:
            transaction.on_commit(partial(spent.inc, row.tool_key or "model", by=row.amount / MICRO), robust=True)


def gauges() -> Iterable[Gauge]:
    """None: sums over accounts would be heavy. The page learns here of what is counted above."""
    return ()
