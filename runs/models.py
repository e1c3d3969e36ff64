"""Runs and their journal, and the catalogue of models and tools.

The turns and tool invocations of a run are its journal: a worker that takes the run over continues from them.
Only ``runs.lifecycle`` writes a status.
"""

from typing import Any

from django.conf import settings
from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from chats.models import Chat
from config.database.protected import ProtectedModel
from config.kernel.choices import StatusChoices
from config.kernel.encryption import EncryptedField
from config.kernel.ids import IdField, RefField
from credits.usage import MODEL_KEY


class RunStatus(StatusChoices):
    QUEUED = "queued", "default", False
    RUNNING = "running", "info", False
    WAITING = "waiting", "warning", False
    COMPLETED = "completed", "success", True
    FAILED = "failed", "danger", True
    CANCELLED = "cancelled", "default", True


class InvocationStatus(StatusChoices):
    PENDING = "PENDING", "warning", False
    DISPATCHING = "DISPATCHING", "info", False
    COMPLETED = "COMPLETED", "success", True
    FAILED = "FAILED", "danger", True
    REFUSED = "REFUSED", "default", True
    CANCELLED = "CANCELLED", "default", True


class WaitpointKind(models.TextChoices):
    CREDIT_APPROVAL = "CREDIT_APPROVAL"
    CLARIFICATION = "CLARIFICATION"


class WaitpointStatus(StatusChoices):
    PENDING = "PENDING", "warning", False
    COMPLETED = "COMPLETED", "success", True
    EXPIRED = "EXPIRED", "default", True


FINAL_RUN_STATUSES = RunStatus.all_final()
LIVE_RUN_STATUSES = RunStatus.all_live()
FINAL_INVOCATION_STATUSES = InvocationStatus.all_final()


class AgentModel(models.Model):
    """A model that a run may request by ``name``. Prices are micro-credits per 1,000 tokens."""

    name = models.CharField(max_length=100, unique=True)
    display_name = models.CharField(max_length=100)
    # A name of ``runs.llm.registry.PROVIDERS``.
    provider = models.CharField(max_length=20)
    provider_model = models.CharField(max_length=200)
    price_in = models.BigIntegerField()
    price_out = models.BigIntegerField()
    is_default = models.BooleanField(default=False)
    enabled = models.BooleanField(default=True)

    class Meta:
        verbose_name = "model"
        constraints = [
            models.UniqueConstraint(fields=["is_default"], condition=Q(is_default=True), name="model_one_default"),
            models.CheckConstraint(condition=Q(price_in__gte=0, price_out__gte=0), name="model_prices_not_negative"),
        ]

    def __str__(self) -> str:
        return self.name

    def validate_constraints(self, exclude: Any = None) -> None:
        # The admin saves a new default in place of the present one, which the constraint of one default would refuse.
        super().validate_constraints(exclude={*(exclude or ()), "is_default"})


class Tool(models.Model):
    """A tool that runs may call by ``name``. ``price``: micro-credits a call, both the estimate and the maximum."""

    class Approval(models.TextChoices):
        THRESHOLD = "threshold", "when the estimate is over the run's threshold"
        ALWAYS = "always", "before every call"
        NEVER = "never", "never"

    name = models.CharField(max_length=64, unique=True)
    display_name = models.CharField(max_length=100)
    description = models.TextField()
    # A name of ``runs.tools.dispatch.TYPES``.
    node_type = models.CharField(max_length=10)
    input_schema = models.JSONField(default=dict, blank=True)
    price = models.BigIntegerField()
    approval = models.CharField(max_length=10, choices=Approval.choices, default=Approval.THRESHOLD)
    timeout_seconds = models.FloatField(null=True, blank=True)
    # Whether a call whose outcome was lost with its worker may be repeated, with the same idempotency key.
    repeatable = models.BooleanField(default=False)
    # Of an http tool the address of its calls, of an mcp tool its server's.
    url = models.CharField(max_length=2048, default="", blank=True)
    # An mcp tool's name on its server; empty if it is the same.
    remote_name = models.CharField(max_length=200, default="", blank=True)
    # What authenticates this service there: a JSON object of header names to values.
    secret_headers = EncryptedField(null=True, blank=True)
    enabled = models.BooleanField(default=True)

    class Meta:
        constraints = [
            models.CheckConstraint(condition=Q(price__gte=0), name="tool_price_not_negative"),
            models.CheckConstraint(
                condition=~Q(name=MODEL_KEY),
                name="tool_not_named_as_model_usage",
                violation_error_message=f"A tool cannot be named {MODEL_KEY}: usage reports have this name for models.",
            ),
        ]

    def __str__(self) -> str:
        return self.name


class Worker(models.Model):
    """A run worker process. Its heartbeat renews the lease of all its runs at once."""

    id = IdField(prefix="wrk")
    host = models.CharField(max_length=255)
    pid = models.PositiveIntegerField()
    expires_at = models.DateTimeField(db_index=True)
    created_at = models.DateTimeField(db_default=Now())

    def __str__(self) -> str:
        return f"{self.host}:{self.pid}"


class Run(ProtectedModel):
    """One agent execution.

    While a run is running, ``worker_id`` names the process that owns it, and ``lease_token`` fences the writes of that
    process: each owner increments the token, and a write with an older token changes nothing. Any worker may take over
    a running run without ``worker_id``.
    """

    protected_fields = frozenset({"status", "worker_id", "lease_token"})

    id = IdField(prefix="run")
    chat = models.ForeignKey(Chat, models.CASCADE, related_name="runs", db_index=False)
    user = models.ForeignKey(settings.AUTH_USER_MODEL, models.CASCADE, related_name="runs", db_index=False)
    status = models.CharField(max_length=10, choices=RunStatus.choices, default=RunStatus.QUEUED)
    # Queued behind another run of the chat.
    blocked = models.BooleanField(default=False)
    # Queued because the user has RUN_USER_LIMIT running runs; when one of them ends, the oldest throttled one starts.
    throttled = models.BooleanField(default=False)
    user_message_id = RefField()
    assistant_message_id = RefField(null=True)
    requested_model = models.CharField(max_length=100, null=True)
    resolved_model = models.CharField(max_length=100, null=True)
    tools = models.JSONField(null=True)
    credit_approval_threshold = models.BigIntegerField(null=True)
    max_credits = models.BigIntegerField(null=True)
    request_id = models.CharField(max_length=128, default="")
    # The trace span of the request that started the run, for workers that find the run without a message.
    trace_parent = models.CharField(max_length=55, null=True)
    # Counted here, because a page of runs shows it.
    tool_invocation_count = models.PositiveIntegerField(default=0)
    last_stream_index = models.PositiveIntegerField(default=0)
    # Whether the stream has text that no recorded turn holds; the next owner then sends message.reset.
    unrecorded_text = models.BooleanField(default=False)
    cancel_requested_at = models.DateTimeField(null=True)
    error_code = models.CharField(max_length=40, null=True)
    error_message = models.TextField(null=True)
    created_at = models.DateTimeField(db_default=Now())
    updated_at = models.DateTimeField(db_default=Now())
    started_at = models.DateTimeField(null=True)
    finished_at = models.DateTimeField(null=True)
    # Running time before running_since.
    ran_ms = models.BigIntegerField(default=0)
    running_since = models.DateTimeField(null=True)
    worker_id = RefField(null=True)
    lease_token = models.PositiveIntegerField(default=0)
    lease_losses = models.PositiveSmallIntegerField(default=0)
    # When the sweep may nudge a worker again.
    due_at = models.DateTimeField(null=True, db_default=Now())

    class Meta:
        ordering = ["-created_at", "-id"]
        permissions = [
            ("cancel_run", "Can cancel runs"),
            ("read_run_content", "Can read the messages, inputs and results of runs"),
        ]
        constraints = [
            models.UniqueConstraint(
                fields=["chat"], condition=Q(status__in=["running", "waiting"]), name="run_one_active_per_chat"
            ),
            models.UniqueConstraint(
                fields=["chat"],
                condition=Q(status__in=LIVE_RUN_STATUSES, blocked=False),
                name="run_one_unblocked_per_chat",
            ),
            models.CheckConstraint(condition=Q(status="queued") | Q(blocked=False), name="run_blocked_only_if_queued"),
        ]
        indexes = [
            models.Index("chat", "created_at", "id", name="run_by_chat"),
            models.Index("user", "created_at", "id", name="run_by_user"),
            models.Index("user", "status", "created_at", "id", name="run_by_user_status"),
            # Ids are in the order of creation: for the lists of the admin, and the oldest run in a status.
            models.Index("status", "id", name="run_by_status"),
            models.Index("error_code", "id", condition=Q(error_code__isnull=False), name="run_by_error"),
            models.Index("due_at", condition=Q(status="queued", blocked=False), name="run_due"),
            models.Index("user", "created_at", "id", condition=Q(throttled=True), name="run_throttled"),
            models.Index("chat", "created_at", condition=Q(blocked=True), name="run_in_line"),
            models.Index("worker_id", condition=Q(status="running"), name="run_by_worker"),
            models.Index(
                "worker_id",
                condition=Q(status="running", cancel_requested_at__isnull=False),
                name="run_cancel_by_worker",
            ),
        ]

    def __str__(self) -> str:
        return self.id


class Turn(models.Model):
    """One recorded model response. ``tool_calls``: ``[{"id", "name", "arguments"}]``, arguments as the model's text."""

    run = models.ForeignKey(Run, models.CASCADE, related_name="turns", db_index=False)
    index = models.PositiveIntegerField()
    model = models.CharField(max_length=100)
    text = models.TextField(default="")
    tool_calls = models.JSONField(default=list)
    input_tokens = models.PositiveBigIntegerField(default=0)
    output_tokens = models.PositiveBigIntegerField(default=0)
    cost = models.BigIntegerField(default=0)
    started_at = models.DateTimeField()
    finished_at = models.DateTimeField()

    class Meta:
        ordering = ["run", "index"]
        constraints = [models.UniqueConstraint(fields=["run", "index"], name="turn_once_per_index")]

    def __str__(self) -> str:
        return f"turn {self.index} of {self.run_id}"


class ToolInvocation(ProtectedModel):
    id = IdField(prefix="inv")
    run = models.ForeignKey(Run, models.CASCADE, related_name="invocations", db_index=False)
    turn_index = models.PositiveIntegerField()
    call_index = models.PositiveIntegerField()
    tool_call_id = models.CharField(max_length=200)
    name = models.CharField(max_length=200)
    node_type = models.CharField(max_length=10)
    input = models.JSONField(default=dict)
    status = models.CharField(max_length=12, choices=InvocationStatus.choices, default=InvocationStatus.PENDING)
    # Snapshots of the catalogue at the time of the call.
    credit_estimate = models.BigIntegerField(default=0)
    repeatable = models.BooleanField(default=False)
    credit_used = models.BigIntegerField(default=0)
    result = models.TextField(default="")
    result_urls = models.JSONField(default=list)
    error_code = models.CharField(max_length=40, null=True)
    error_message = models.TextField(null=True)
    started_at = models.DateTimeField(null=True)
    finished_at = models.DateTimeField(null=True)
    created_at = models.DateTimeField(db_default=Now())
    updated_at = models.DateTimeField(db_default=Now())

    class Meta:
        ordering = ["run", "turn_index", "call_index"]
        constraints = [
            models.UniqueConstraint(fields=["run", "turn_index", "call_index"], name="invocation_once_per_call")
        ]

    def __str__(self) -> str:
        return f"{self.name} {self.id}"

    @property
    def duration_ms(self) -> int | None:
        """From dispatch to result, in milliseconds."""
        if self.started_at is None or self.finished_at is None:
            return None
        return max(0, round((self.finished_at - self.started_at).total_seconds() * 1000))


class Waitpoint(ProtectedModel):
    """A question about one invocation, whose answer by the user the run waits for.

    A call of ``ask_user`` that needs an approval has two: first the approval, then the question.
    """

    id = IdField(prefix="wp")
    run = models.ForeignKey(Run, models.CASCADE, related_name="waitpoints")
    invocation = models.ForeignKey(ToolInvocation, models.CASCADE, related_name="waitpoints", db_index=False)
    kind = models.CharField(max_length=20, choices=WaitpointKind.choices)
    status = models.CharField(max_length=10, choices=WaitpointStatus.choices, default=WaitpointStatus.PENDING)
    request_payload = models.JSONField()
    resolved_payload = models.JSONField(null=True)
    expires_at = models.DateTimeField()
    resolved_at = models.DateTimeField(null=True)
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["run"], condition=Q(status="PENDING"), name="waitpoint_one_pending_per_run"
            ),
            models.UniqueConstraint(fields=["invocation", "kind"], name="waitpoint_one_of_a_kind_per_call"),
        ]
        indexes = [models.Index("expires_at", condition=Q(status="PENDING"), name="waitpoint_expiring")]

    def __str__(self) -> str:
        return f"{self.kind} {self.id}"


class RunEvent(models.Model):
    """An event of the run's stream, indexed from 1 without gaps. ``data`` is the JSON text that clients receive."""

    run = models.ForeignKey(Run, models.CASCADE, related_name="events", db_index=False)
    index = models.PositiveIntegerField()
    type = models.CharField(max_length=30)
    data = models.TextField()
    # The last event of a run that has ended.
    final = models.BooleanField(default=False)
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        ordering = ["run", "index"]
        constraints = [models.UniqueConstraint(fields=["run", "index"], name="event_once_per_index")]

    def __str__(self) -> str:
        return f"{self.type} {self.index} of {self.run_id}"
