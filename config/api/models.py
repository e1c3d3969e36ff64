"""Records of idempotency keys, which only ``idempotency.py`` reads and writes, and of erased subjects."""

from django.conf import settings
from django.db import models
from django.db.models.functions import Now
from django.utils.crypto import salted_hmac


class IdempotencyRecord(models.Model):
    """A key in use (``response_status`` null) or the answer to replay. ``claim`` is the fence of its request."""

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


class ErasedSubject(models.Model):
    """Keyed digest of an erased user's name: session tokens from before the erasure must not create the user again."""

    digest = models.CharField(max_length=64, primary_key=True)
    erased_at = models.DateTimeField(db_default=Now())

    def __str__(self) -> str:
        return self.digest

    @staticmethod
    def digest_of(username: str) -> str:
        return salted_hmac("config.api.ErasedSubject", username, algorithm="sha256").hexdigest()
