"""Permanent deletion of deliveries with their attempts."""

from __future__ import annotations

from django.db import transaction
from django.db.models import QuerySet

from config.database import batches
from webhooks.models import Attempt, Delivery

BATCH = 1000


@transaction.atomic
def remove_deliveries(deliveries: QuerySet[Delivery]) -> int:
    """Delete a batch of ``deliveries``. Leaves those that a worker is about to record. Returns how many it deleted."""
    taken = batches.take_batch(deliveries, BATCH, to_delete=True)
    batches.delete_rows(Attempt, "delivery_id", taken)
    batches.delete_rows(Delivery, "id", taken)
    return len(taken)
