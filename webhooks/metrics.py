"""The metrics of webhooks: attempts and their lag are counted when recorded, the backlog at each scrape."""

from collections.abc import Iterator
from datetime import datetime, timedelta

from config.kernel import clock
from config.telemetry.metrics import Counter, Gauge, Histogram
from webhooks.models import Delivery

attempts = Counter(
    "webhook_attempts", "Attempts by outcome: the answer's class, or error if there was none.", ["outcome"]
)
dead = Counter("webhook_deliveries_dead", "Deliveries given up after their last attempt.")
dropped = Counter(
    "webhook_deliveries_dropped",
    "Deliveries given up because their endpoint was disabled or deleted (endpoint), or had too many (excess).",
    ["reason"],
)
lag_seconds = Histogram("webhook_lag_seconds", "From an event to its delivery's first attempt.")

# Counting a larger backlog would be slow, and would say no more.
COUNT_MAX = 100_000


def oldest_due(now: datetime) -> datetime | None:
    """The time at which the delivery that has waited longest became due; None if nothing is due."""
    due = Delivery.objects.filter(status=Delivery.Status.PENDING, next_attempt_at__lte=now).order_by("next_attempt_at")
    # One query for each part of the index. SQLite uses the index for IN only.
    parts = [due.filter(ready__in=[ready]).values_list("next_attempt_at", flat=True).first() for ready in (True, False)]
    return min((first for first in parts if first), default=None)


def gauges() -> Iterator[Gauge]:
    """The number and the longest wait of due deliveries, by the index of pending ones."""
    now = clock.now()
    first = oldest_due(now)
    waiting = (now - first if first else timedelta()).total_seconds()
    due = Delivery.objects.filter(status=Delivery.Status.PENDING, ready__in=(True, False), next_attempt_at__lte=now)
    count = due.order_by()[:COUNT_MAX].count()
    yield Gauge("webhook_deliveries_due", f"Deliveries that are due; {COUNT_MAX} stands for more.", {(): float(count)})
    yield Gauge("webhook_oldest_due_seconds", "How long the oldest due delivery has waited.", {(): waiting})
