"""What is measured of webhooks: attempts and their lag counted where they are recorded, the backlog read when asked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

from config.kernel import clock
from config.telemetry.metrics import Counter, Gauge, Histogram
from webhooks.models import Delivery

if TYPE_CHECKING:
    from webhooks.transitions import Made

attempts = Counter(
    "webhook_attempts", "Attempts by outcome: the answer's class, or error if there was none.", ["outcome"]
)
dead = Counter("webhook_deliveries_dead", "Deliveries given up after their last attempt.")
lag_seconds = Histogram("webhook_lag_seconds", "From an event to its delivery's first attempt.")

# Counting a backlog beyond this would be slow, and tells nothing more.
COUNT_MAX = 100_000


def recorded(made: Iterable[Made], died: int) -> None:
    """Count attempts that are committed; ``died`` of their deliveries are given up."""
    for one in made:
        status = one.outcome.status_code
        attempts.inc(f"{status // 100}xx" if status else "error")
        if one.number == 1:
            lag_seconds.observe(max(0.0, (one.outcome.started_at - one.created_at).total_seconds()))
    if died:
        dead.inc(by=died)


def gauges() -> Iterator[Gauge]:
    """What is due now, by the index of pending deliveries."""
    now = clock.now()
    due = Delivery.objects.filter(status=Delivery.Status.PENDING, next_attempt_at__lte=now).order_by("next_attempt_at")
    first = due.values_list("next_attempt_at", flat=True).first()
    waiting = (now - first if first else timedelta()).total_seconds()
    count = due.order_by()[:COUNT_MAX].count()
    yield Gauge("webhook_deliveries_due", f"Deliveries that are due; {COUNT_MAX} stands for more.", {(): float(count)})
    yield Gauge("webhook_oldest_due_seconds", "How long the oldest due delivery has waited.", {(): waiting})
