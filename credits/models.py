"""The account of each user and the append-only ledger. Amounts are micro-credits. ``ledger.py`` is the only writer.
Triggers (migrations) maintain the totals, and reject each UPDATE or DELETE of a row of the ledger.
"""

from typing import ClassVar, Self

from django.conf import settings
from django.db import models
from django.db.models import F, Q
from django.db.models.functions import Now
from django.dispatch import Signal

from config.kernel.ids import IdField, RefField

# Larger than any realistic sum, and far enough below 2⁶³ that one more amount cannot overflow.
BALANCE_LIMIT = 9 * 10**18
REASON_MAX_CHARS = 500
REFERENCE_MAX_CHARS = 200
GRANT_DAYS_MAX = 3650  # The limit keeps the end of a grant inside the range of dates.


class EntryType(models.TextChoices):
    """``NAME = value, its colour in the admin, effect on the balance, effect on held``: the amount's factors."""

    tone: str
    balance: int
    held: int

    GRANT = "GRANT", "success", +1, 0
    HOLD = "HOLD", "info", 0, +1
    CAPTURE = "CAPTURE", "primary", -1, -1
    RELEASE = "RELEASE", "info", 0, -1
    USAGE = "USAGE", "primary", -1, -1
    REFUND = "REFUND", "success", +1, 0
    ADJUSTMENT = "ADJUSTMENT", "warning", +1, 0  # only this amount may be negative
    EXPIRY = "EXPIRY", "warning", -1, 0

    def __new__(cls, value: str, tone: str, balance: int, held: int) -> Self:
        member = str.__new__(cls, value)
        member._value_ = value
        member.tone, member.balance, member.held = tone, balance, held
        return member


# Lists, not sets: SQLite uses a partial index only if the query repeats its condition literally.
SETTLEMENTS = [EntryType.CAPTURE, EntryType.RELEASE, EntryType.USAGE]
CHARGES = [EntryType.CAPTURE, EntryType.USAGE]
SPENDING = [*CHARGES, EntryType.REFUND]
CORRECTIONS = [EntryType.REFUND, EntryType.EXPIRY]
# The rows by which the app's backend took a grant back. Their ``price`` is ``{"left": the unspent part of the grant,
# "balance": the account's balance afterwards}``. The ``price`` of the backend's grants has only "balance".
REVOCATION = Q(type=EntryType.ADJUSTMENT, against__isnull=False)
BY_STAFF = Q(type__in=[EntryType.REFUND, EntryType.ADJUSTMENT])
STAFF_TYPES = [EntryType.GRANT, EntryType.REFUND, EntryType.ADJUSTMENT, EntryType.EXPIRY]


class Account(models.Model):
    """A user's credits. available = balance − held. ``debt``: how far staff or revocations took it below zero."""

    user = models.OneToOneField(
        settings.AUTH_USER_MODEL, models.PROTECT, primary_key=True, related_name="credit_account"
    )
    balance = models.BigIntegerField(default=0)
    held = models.BigIntegerField(default=0)
    debt = models.BigIntegerField(default=0)
    # One bit for each of CREDITS_LOW_THRESHOLDS below which the balance has fallen, until that is reported.
    low_due = models.IntegerField(default=0)
    created_at = models.DateTimeField(db_default=Now())
    updated_at = models.DateTimeField(db_default=Now())

    class Meta:
        indexes = [models.Index("user", condition=~Q(low_due=0), name="account_low_due")]
        permissions = [
            ("grant_credits", "Can grant credits"),
            ("refund_credits", "Can refund credits"),
            ("adjust_credits", "Can adjust accounts"),
        ]
        constraints = [
            models.CheckConstraint(condition=Q(held__gte=0), name="account_held_not_negative"),
            models.CheckConstraint(
                condition=Q(balance__gte=F("held") - F("debt")), name="account_available_not_negative"
            ),
            models.CheckConstraint(
                condition=Q(balance__gte=-BALANCE_LIMIT, balance__lte=BALANCE_LIMIT), name="account_balance_in_range"
            ),
        ]

    def __str__(self) -> str:
        return f"account of {self.user}"

    @property
    def available(self) -> int:
        return self.balance - self.held


class LedgerEntry(models.Model):
    """One movement. ``cause`` is unique: the same cause never moves credits twice. ``against`` is the row that this row
    settles (CAPTURE, USAGE, RELEASE: the HOLD), refunds (REFUND: the CAPTURE or USAGE), expires (EXPIRY: the GRANT) or
    revokes (ADJUSTMENT by the app's backend: the GRANT). ``tool_key`` is the name of a tool, null for model usage.
    ``reference`` is the backend's own id of a payment or of its refund.
    """

    id = IdField(prefix="led")
    account = models.ForeignKey(Account, models.PROTECT, related_name="entries", db_index=False)
    type = models.CharField(max_length=12, choices=EntryType.choices)
    amount = models.BigIntegerField()
    tool_key = models.CharField(max_length=100, null=True)
    chat_id = RefField(null=True)
    run_id = RefField(null=True)
    invocation_id = RefField(null=True)
    against = models.ForeignKey("self", models.PROTECT, null=True, related_name="answers", db_index=False)
    cause = models.CharField(max_length=200)
    price = models.JSONField(null=True)
    reason = models.CharField(max_length=REASON_MAX_CHARS, default="")
    staff = models.ForeignKey(settings.AUTH_USER_MODEL, models.PROTECT, null=True, related_name="+", db_index=False)
    reference = models.CharField(max_length=REFERENCE_MAX_CHARS, null=True)
    expires_at = models.DateTimeField(null=True)
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        ordering = ["-created_at", "-id"]
        verbose_name_plural = "ledger entries"
        constraints = [
            models.CheckConstraint(condition=Q(type__in=EntryType.values), name="ledger_type_known"),
            models.CheckConstraint(
                condition=Q(amount__gt=0)
                | Q(type=EntryType.USAGE, amount=0)
                | Q(type=EntryType.ADJUSTMENT, amount__lt=0)
                | Q(type=EntryType.ADJUSTMENT, amount=0, against__isnull=False),
                name="ledger_amount_sign",
            ),
            models.CheckConstraint(
                condition=Q(type__in=SETTLEMENTS + CORRECTIONS, against__isnull=False)
                | (~Q(type__in=SETTLEMENTS + CORRECTIONS) & Q(against__isnull=True))
                | Q(type=EntryType.ADJUSTMENT, amount__lte=0),
                name="ledger_against_by_type",
            ),
            models.CheckConstraint(
                condition=Q(type=EntryType.GRANT) | Q(expires_at__isnull=True), name="ledger_only_grants_expire"
            ),
            models.CheckConstraint(condition=~BY_STAFF | ~Q(reason=""), name="ledger_correction_has_reason"),
            models.CheckConstraint(
                condition=~BY_STAFF | Q(staff__isnull=False) | REVOCATION, name="ledger_correction_has_staff"
            ),
            # Not unique=True: it would add an index for LIKE on PostgreSQL, which no query uses.
            models.UniqueConstraint(fields=["cause"], name="ledger_cause_once"),
            models.UniqueConstraint(
                fields=["against", "type"], condition=Q(type__in=SETTLEMENTS), name="ledger_one_settlement_of_a_kind"
            ),
        ]
        indexes = [
            models.Index("account", "created_at", "id", name="ledger_by_account"),
            # For the partial day at the start of a report. The columns after ``created_at`` allow an index-only scan.
            models.Index(
                *("account", "created_at", "type", "tool_key", "chat_id", "amount"),
                condition=Q(type__in=SPENDING),
                name="ledger_spending",
            ),
            models.Index("run_id", "type", "amount", condition=Q(run_id__isnull=False), name="ledger_by_run"),
            # The admin filters by these types, which are rare among millions of rows.
            models.Index("type", "id", condition=Q(type__in=STAFF_TYPES), name="ledger_by_staff_type"),
            models.Index("against", "amount", condition=Q(type__in=CORRECTIONS), name="ledger_corrections"),
            # What is left of the grants follows from these few rows, and from sums of the charges between them.
            models.Index("account", "created_at", condition=Q(type__in=STAFF_TYPES), name="ledger_changes"),
        ]

    def __str__(self) -> str:
        return f"{self.type} {self.id}"

    @property
    def is_charge(self) -> bool:
        return self.type in CHARGES


# Sent in the transaction that adds credits to an account by a grant, a refund or an adjustment. Argument: user_id.
credits_added = Signal()


class PendingExpiry(models.Model):
    """A grant that expires and that ``grants.expire_grants`` has not finished yet."""

    grant = models.OneToOneField(LedgerEntry, models.PROTECT, primary_key=True, related_name="+")
    account = models.ForeignKey(Account, models.PROTECT, related_name="+", db_index=False)
    expires_at = models.DateTimeField()

    class Meta:
        verbose_name_plural = "pending expiries"
        indexes = [models.Index("account", "expires_at", name="expiry_by_account")]

    def __str__(self) -> str:
        return f"expiry of {self.grant_id}"


class UsageTotal(models.Model):
    """A sum of ledger rows of an account, for the reports. Always exact. ``tool_key`` is empty for model usage."""

    types: ClassVar = SPENDING  # the types of the rows in the sum, in which refunds are negative
    # Without a database constraint: that of the ledger row is enough.
    account = models.ForeignKey(Account, models.PROTECT, related_name="+", db_index=False, db_constraint=False)
    amount = models.BigIntegerField()
    records = models.BigIntegerField()
    latest = models.DateTimeField()

    class Meta:
        abstract = True

    def __str__(self) -> str:
        return f"{self._meta.verbose_name} {self.pk}"


class DayTotal(UsageTotal):
    """Charges by UTC day and tool, without refunds."""

    types = CHARGES
    pk = models.CompositePrimaryKey("account", "day", "tool_key")
    day = models.DateField()
    tool_key = models.CharField(max_length=100)

    class Meta:
        # For the reports of staff over all accounts. The amount is not in the index, because every charge changes it.
        indexes = [models.Index("day", name="day_total_by_day")]


class ChatTotal(UsageTotal):
    """Charges less refunds by chat."""

    pk = models.CompositePrimaryKey("account", "chat_id")
    chat_id = RefField()


class ChatDayTotal(UsageTotal):
    """Charges less refunds by UTC day and chat."""

    pk = models.CompositePrimaryKey("account", "day", "chat_id")
    day = models.DateField()
    chat_id = RefField()


class RunTotal(UsageTotal):
    """Charges less refunds by chat, run and tool."""

    pk = models.CompositePrimaryKey("account", "chat_id", "run_id", "tool_key")
    chat_id = RefField()
    run_id = RefField()
    tool_key = models.CharField(max_length=100)
