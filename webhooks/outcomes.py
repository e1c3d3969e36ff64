"""How an attempt went. ``sender`` reports it, ``transitions`` records it, ``metrics`` counts it."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

# Seconds from the end of a failed attempt to the next one. The first attempt is made at once.
WAITS = (30, 90, 270, 600)
MAX_ATTEMPTS = len(WAITS) + 1
# The error of an attempt whose process ended before it recorded how the attempt went.
UNKNOWN = "The outcome is not known."


def succeeded(status_code: int | None) -> bool:
    return status_code is not None and 200 <= status_code < 300


@dataclass(frozen=True)
class Outcome:
    """How one attempt went. ``status_code`` and ``error`` exclude each other."""

    delivery_id: str
    claim_id: str
    endpoint_id: str
    endpoint_failing: bool | None  # as it was when the attempt was claimed
    started_at: datetime
    duration_ms: int
    status_code: int | None
    error: str | None
    answer: str = field(default="", repr=False)
    sent: bool = True  # False if it is certain that nothing was sent

    @property
    def succeeded(self) -> bool:
        return succeeded(self.status_code)


@dataclass(frozen=True)
class RecordedAttempt:
    """An attempt that ended: ``created_at`` is its delivery's."""

    outcome: Outcome
    number: int
    created_at: datetime
