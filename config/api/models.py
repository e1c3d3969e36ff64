"""Records of idempotency keys. ``idempotency.py`` is their only reader and writer."""

from __future__ import annotations

from django.conf import settings
from django.db import models


class IdempotencyRecord(models.Model):
    """A key in use (``response_status`` null) or the answer to replay. ``claim`` is the fence of the request that
    holds the row.
    """

    user = models.ForeignKey(settings.AUTH_USER_MODEL, models.CASCADE, related_name="+", db_index=False)
    surface = models.CharField(max_length=8)
    key = models.CharField(max_length=255)
    fingerprint = models.CharField(max_length=64)
    claim = models.CharField(max_length=32)
    claimed_at = models.DateTimeField()
    response_status = models.PositiveSmallIntegerField(null=True)
    # Null although ``response_status`` is set: the answer contained a secret and was not stored.
    response_body = models.BinaryField(null=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["user", "surface", "key"], name="idempotency_key_once")]
        indexes = [models.Index("claimed_at", name="idempotency_claimed_at")]

    def __str__(self) -> str:
        return f"{self.surface} {self.key}"
