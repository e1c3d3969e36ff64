"""Webhook endpoints, deliveries (``outbox.py`` inserts them) and attempts. ``transitions.py`` writes every status."""

from datetime import datetime
from typing import Any, ClassVar

from django.conf import settings
from django.db import models
from django.db.models import Q
from django.db.models.functions import Coalesce, Now

from config.database.protected import ProtectedModel
from config.kernel.choices import StatusChoices
from config.kernel.encryption import EncryptedField
from config.kernel.ids import ID_LENGTH, IdField, RefField


class Endpoint(models.Model):
    """A user's endpoint or, without a user, that of the installation, which gets the events of all users. A deleted
    endpoint keeps its row, without secrets, because its deliveries refer to it. ``failing``: whether the latest attempt
    failed; null before the first one. While ``drop_until`` is set, nothing is sent, and pending deliveries that were
    recorded until that time are being marked dead.
    """

    STATES: ClassVar = {
        "works": "success",
        "failing": "danger",
        "not used yet": "info",
        "disabled": "warning",
        "deleted": "default",
    }

    id = IdField(prefix="whe")
    user = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.CASCADE, null=True, related_name="webhook_endpoints", db_index=False
    )
    url = models.CharField(max_length=2048)
    # Without readable secrets, everything except signing works.
    secret = EncryptedField(lost="")
    secondary_secret = EncryptedField(null=True, lost=None)
    secondary_expires_at = models.DateTimeField(null=True)
    enabled = models.BooleanField(default=True)
    extended_events = models.BooleanField(default=False, db_default=False)
    failing = models.BooleanField(null=True)
    drop_until = models.DateTimeField(null=True)
    created_at = models.DateTimeField(db_default=Now())
    updated_at = models.DateTimeField(db_default=Now())
    deleted_at = models.DateTimeField(null=True)

    class Meta:
        permissions = [
            ("disable_endpoint", "Can disable webhook endpoints"),
            ("set_installation_endpoint", "Can set up the installation endpoint"),
        ]
        constraints = [
            models.UniqueConstraint(fields=["user"], condition=Q(deleted_at=None), name="endpoint_one_per_user"),
            # In a unique index, two nulls are different values.
            models.UniqueConstraint(
                Coalesce("user", 0), condition=Q(user=None, deleted_at=None), name="endpoint_one_of_installation"
            ),
        ]
        indexes = [
            models.Index("user", "id", name="endpoint_by_user"),
            models.Index("drop_until", condition=Q(drop_until__isnull=False), name="endpoint_dropping"),
        ]

    def __str__(self) -> str:
        return f"endpoint {self.id}"

    @property
    def state(self) -> str:
        """What staff see, one of STATES."""
        if self.deleted_at is not None or not self.enabled:
            return "deleted" if self.deleted_at is not None else "disabled"
        return "not used yet" if self.failing is None else "failing" if self.failing else "works"

    @property
    def tone(self) -> str:
        return self.STATES[self.state]

    def secondary_at(self, moment: datetime) -> str | None:
        """The previous secret, during its grace window."""
        is_over = self.secondary_expires_at is None or self.secondary_expires_at <= moment
        return None if is_over else self.secondary_secret


class Delivery(ProtectedModel):
    """One event for one endpoint. An event for the user's and the installation's endpoint has two deliveries.
    ``attempt_count`` counts the claims. A pending delivery that is ``ready`` may be claimed. Otherwise it waits until
    ``next_attempt_at``: the time when it is due again, or, while ``claim_id`` is set, the time when the claim lapses.
    """

    class Status(StatusChoices):
        PENDING = "PENDING", "warning", False
        DELIVERED = "DELIVERED", "success", True
        DEAD = "DEAD", "danger", True

    id = IdField(prefix="dlv")
    event_id = models.CharField(max_length=ID_LENGTH)
    endpoint = models.ForeignKey(Endpoint, models.CASCADE, related_name="deliveries", db_index=False)
    # The endpoint's user, for an index of all deliveries of a user, also to earlier endpoints. Null for the
    # installation endpoint, whose deliveries no user sees.
    user = models.ForeignKey(settings.AUTH_USER_MODEL, models.CASCADE, null=True, related_name="+", db_index=False)
    event_type = models.CharField(max_length=40)
    # Null if no run caused the event.
    run_id = RefField(null=True)
    chat_id = RefField(null=True)
    # The id of the request that caused the run, for the log; empty if unknown.
    request_id = models.CharField(max_length=128, default="", db_default="")
    # The exact bytes of every attempt, fixed when the event is recorded.
    body = models.TextField()
    status = models.CharField(max_length=10, choices=Status.choices, default=Status.PENDING)
    attempt_count = models.PositiveSmallIntegerField(default=0)
    next_attempt_at = models.DateTimeField(null=True, db_default=Now())
    ready = models.BooleanField(default=True, db_default=True)
    claim_id = models.CharField(max_length=ID_LENGTH, null=True)
    created_at = models.DateTimeField(db_default=Now())
    finished_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["-created_at", "-id"]
        verbose_name_plural = "deliveries"
        constraints = [
            models.UniqueConstraint(fields=["event_id", "endpoint"], name="delivery_once_per_endpoint"),
            # Refuses an unknown status too.
            models.CheckConstraint(
                condition=Q(status="PENDING", next_attempt_at__isnull=False, finished_at__isnull=True)
                | Q(status__in=["DELIVERED", "DEAD"], next_attempt_at__isnull=True, finished_at__isnull=False),
                name="delivery_due_until_finished",
            ),
        ]
        indexes = [
            # ``ready`` comes first: a claim reads only the endpoints that have something to send, however many wait.
            models.Index("ready", "next_attempt_at", condition=Q(status="PENDING"), name="delivery_due"),
            models.Index(
                "ready", "endpoint", "next_attempt_at", condition=Q(status="PENDING"), name="delivery_due_by_endpoint"
            ),
            models.Index("endpoint", condition=Q(claim_id__isnull=False, status="PENDING"), name="delivery_claimed"),
            models.Index("endpoint", name="delivery_by_endpoint"),
            models.Index("run_id", name="delivery_by_run"),
            models.Index("id", condition=Q(status="DEAD"), name="delivery_dead"),
            models.Index("user", "created_at", "id", name="delivery_by_user"),
            models.Index("user", "status", "created_at", "id", name="delivery_by_user_status"),
            models.Index("finished_at", condition=Q(finished_at__isnull=False), name="delivery_finished"),
        ]

    def __str__(self) -> str:
        return f"{self.event_type} {self.id}"

    def is_claimed_until(self, moment: datetime) -> bool:
        """Whether the claim, which this process has made, still holds at ``moment``."""
        return self.next_attempt_at is not None and moment <= self.next_attempt_at

    def attempt(self, **outcome: Any) -> "Attempt":
        """The present attempt of a claimed delivery; it is not stored yet."""
        return Attempt(delivery=self, number=self.attempt_count, **outcome)


class Attempt(models.Model):
    """One attempt. Either ``status_code`` or ``error`` is set; ``answer`` is the start of the receiver's answer. An
    attempt without ``started_at`` was certainly not sent, and is not stored.
    """

    delivery = models.ForeignKey(Delivery, models.CASCADE, related_name="attempts", db_index=False)
    number = models.PositiveSmallIntegerField()
    started_at = models.DateTimeField()
    duration_ms = models.PositiveIntegerField()
    status_code = models.PositiveSmallIntegerField(null=True)
    error = models.CharField(max_length=200, null=True)
    answer = models.TextField(default="")

    class Meta:
        ordering = ["number"]
        constraints = [models.UniqueConstraint(fields=["delivery", "number"], name="attempt_once_per_number")]

    def __str__(self) -> str:
        return f"attempt {self.number} of {self.delivery_id}"

    @property
    def succeeded(self) -> bool:
        return self.status_code is not None and 200 <= self.status_code < 300
