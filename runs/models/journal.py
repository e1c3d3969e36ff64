"""The journal of a run, from which a worker that takes it over continues. Only ``runs.lifecycle`` writes a status."""

from datetime import datetime, timedelta

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from chats.models import Chat
from config.database.protected import ProtectedModel
from config.kernel.choices import StatusChoices
from config.kernel.ids import IdField, RefField
from config.kernel.jsontext import JSONTextField
from runs.models.runs import Awaiting, Run


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


class CompactionKind(models.TextChoices):
    RESULTS = "results", "results of earlier turns replaced by notes"
    SUMMARY = "summary", "earlier runs summarised"
    LEFT_OUT = "left_out", "earlier runs left out"


class WaitpointStatus(StatusChoices):
    PENDING = "PENDING", "warning", False
    COMPLETED = "COMPLETED", "success", True
    EXPIRED = "EXPIRED", "default", True


FINAL_INVOCATION_STATUSES = [status for status in InvocationStatus if status.final]


class Turn(models.Model):
    """One recorded model response. ``tool_calls``: ``[{"id", "name", "arguments"}]``, with the arguments as the model's
    text. Calls of OUTPUT_TOOL have no ToolInvocation, but also "key" and "told": what the model was told, or null if
    the call gave the output. ``input_tokens`` include ``cached_tokens`` and ``cache_write_tokens``, which the provider
    read from its cache and wrote to it. ``reasoning`` are the provider's own items, which are sent back only to the
    same ``origin`` (kind and name of the provider, and name of the model).
    """

    run = models.ForeignKey(Run, models.CASCADE, related_name="turns", db_index=False)
    index = models.PositiveIntegerField()
    model = models.CharField(max_length=100)
    origin = models.CharField(max_length=300, default="")
    text = models.TextField(default="")
    tool_calls = models.JSONField(default=list)
    reasoning = JSONTextField(default=list)
    finish_reason = models.CharField(max_length=20, default="stop")
    input_tokens = models.PositiveBigIntegerField(default=0)
    cached_tokens = models.PositiveBigIntegerField(default=0)
    cache_write_tokens = models.PositiveBigIntegerField(default=0)
    output_tokens = models.PositiveBigIntegerField(default=0)
    reasoning_tokens = models.PositiveBigIntegerField(default=0)
    estimated = models.BooleanField(default=False)  # the provider reported no counts
    held = models.BigIntegerField(default=0)  # the amount that was held before the request; 0 for a free model
    cost = models.BigIntegerField(default=0)
    # The digest of the whole request (``runs.llm.measure``).
    request_digest = models.CharField(max_length=32, default="")
    # The request's size as ``runs.engine.context.plan`` measures it.
    context_bytes = models.PositiveBigIntegerField(default=0)
    started_at = models.DateTimeField()
    finished_at = models.DateTimeField()

    class Meta:
        ordering = ["run", "index"]
        constraints = [models.UniqueConstraint(fields=["run", "index"], name="turn_once_per_index")]

    def __str__(self) -> str:
        return f"turn {self.index} of {self.run_id}"


class CountedBeginning(models.Model):
    """The fewest tokens that a provider has counted for a request with this beginning (``runs.engine.requests``)."""

    digest = models.CharField(max_length=32, primary_key=True)
    tokens = models.PositiveBigIntegerField()
    created_at = models.DateTimeField(db_default=Now(), db_index=True)


class Compaction(models.Model):
    """A step of ``run`` that shortens the chat's transcript for the run's turn ``turn_index`` and all later requests of
    the chat. Messages stay as they are. Each row has the whole state, so a chat's newest row says what its next request
    leaves out: the runs up to ``last_run_id``, which ``text`` replaces, and the results up to the turn ``notes_turn``
    of ``notes_run_id``. For later requests of ``run`` itself also: the texts and arguments up to ``short_turn``, and
    the ends of results with more than ``result_chars`` characters up to ``result_turn``. Tokens and cost are those of a
    summary.
    """

    KEY = "c{}"  # of the index: ``turn`` in the price of the summary's ledger rows

    chat = models.ForeignKey(Chat, models.CASCADE, related_name="compactions", db_index=False)
    run = models.ForeignKey(Run, models.CASCADE, related_name="compactions", db_index=False)
    index = models.PositiveIntegerField()  # from 1, for each run
    turn_index = models.PositiveIntegerField()
    # The failed requests of that turn so far: a provider's refusal as too long is one of them.
    failed_attempts = models.PositiveIntegerField(default=0)
    kind = models.CharField(max_length=10, choices=CompactionKind.choices)
    # Whether later runs do not use it. True for the shortest form of a request that the provider refused, for runs that
    # were left out because no model could summarise them at that time, and for later compactions of the same run.
    only_run = models.BooleanField(default=False)
    last_run_id = RefField(null=True)
    text = models.TextField(default="")
    notes_run_id = RefField(null=True)
    notes_turn = models.PositiveIntegerField(default=0)
    short_turn = models.PositiveIntegerField(default=0)
    result_chars = models.PositiveIntegerField(null=True)
    result_turn = models.PositiveIntegerField(default=0)
    # Estimates of the run's next request.
    tokens_before = models.PositiveBigIntegerField()
    tokens_after = models.PositiveBigIntegerField()
    model = models.CharField(max_length=100, default="")
    input_tokens = models.PositiveBigIntegerField(default=0)
    cached_tokens = models.PositiveBigIntegerField(default=0)
    output_tokens = models.PositiveBigIntegerField(default=0)
    held = models.BigIntegerField(default=0)
    cost = models.BigIntegerField(default=0)
    # Why the runs were left out instead of summarised, for staff: a ``runs.errors.FailureReason``.
    failure_reason = models.CharField(max_length=40, default="")
    started_at = models.DateTimeField()
    finished_at = models.DateTimeField()

    class Meta:
        ordering = ["run", "index"]
        constraints = [models.UniqueConstraint(fields=["run", "index"], name="compaction_once_per_index")]
        indexes = [models.Index("chat", "id", name="compaction_by_chat")]


class ModelAttempt(models.Model):
    """A failed request to a model. The attempts of a turn, or of a summary, say which model is asked next, and when."""

    run = models.ForeignKey(Run, models.CASCADE, related_name="model_attempts", db_index=False)
    turn_index = models.PositiveIntegerField()
    # The index of the compaction whose summary was requested; 0 if the turn itself was requested.
    compaction = models.PositiveIntegerField(default=0)
    number = models.PositiveIntegerField()  # from 1, for each turn or summary, over all its models
    model = models.CharField(max_length=100)
    provider = models.CharField(max_length=64)
    reason = models.CharField(max_length=40)
    http_status = models.PositiveSmallIntegerField(null=True)
    detail = models.TextField(default="")  # The provider's own text, without keys. It may quote the conversation.
    # Empty if no model is asked next: the run, or its summary, failed.
    next_model = models.CharField(max_length=100, default="")
    next_at = models.DateTimeField(null=True)
    started_at = models.DateTimeField()
    finished_at = models.DateTimeField()

    class Meta:
        ordering = ["run", "turn_index", "compaction", "number"]
        constraints = [
            models.UniqueConstraint(
                fields=["run", "turn_index", "compaction", "number"], name="model_attempt_once_per_number"
            )
        ]

    @property
    def step(self) -> str:
        """The turn or compaction that was requested, for people."""
        return f"Compaction {self.compaction}" if self.compaction else f"Turn {self.turn_index}"


class ToolInvocation(ProtectedModel):
    protected_fields = frozenset({"status", "awaiting"})

    id = IdField(prefix="inv")
    run = models.ForeignKey(Run, models.CASCADE, related_name="invocations", db_index=False)
    turn_index = models.PositiveIntegerField()
    call_index = models.PositiveIntegerField()
    tool_call_id = models.CharField(max_length=200)
    name = models.CharField(max_length=200)
    node_type = models.CharField(max_length=10)
    input = JSONTextField(default=dict)
    status = models.CharField(max_length=12, choices=InvocationStatus.choices, default=InvocationStatus.PENDING)
    # Snapshots of the catalogue at the time of the call.
    credit_estimate = models.BigIntegerField(default=0)
    repeatable = models.BooleanField(default=False)
    park_seconds = models.PositiveIntegerField(null=True)
    # Who gives the outcome of an open call, until when, and the last progress: ``{"fraction", "message", "at"}``.
    awaiting = models.CharField(max_length=6, choices=Awaiting.choices, null=True)
    expires_at = models.DateTimeField(null=True)
    progress = JSONTextField(null=True)
    # When the tool's server is asked about the open call or told of its end; how often it was; why the call ended.
    contact_at = models.DateTimeField(null=True)
    contacts = models.PositiveIntegerField(default=0)
    end_reason = models.CharField(max_length=20, default="")
    remote_task = models.TextField(default="")  # what the tool's type stores about the call's task on its server
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
        indexes = [
            models.Index("run", condition=Q(awaiting__isnull=False), name="invocation_awaiting"),
            models.Index("expires_at", condition=Q(expires_at__isnull=False), name="invocation_expiring"),
            models.Index("contact_at", condition=Q(contact_at__isnull=False), name="invocation_to_contact"),
        ]

    def __str__(self) -> str:
        return f"{self.name} {self.id}"

    @classmethod
    def open_of(cls, run: Run) -> models.QuerySet["ToolInvocation"]:
        return cls.objects.filter(run=run).exclude(status__in=FINAL_INVOCATION_STATUSES)

    @property
    def is_open(self) -> bool:
        return self.status not in FINAL_INVOCATION_STATUSES

    @property
    def latest_end(self) -> datetime:
        """The time until which a dispatched call may await its tool. It is the same for each attempt of the call."""
        assert self.started_at is not None  # noqa: S101  (it is dispatched)
        return self.started_at + timedelta(seconds=self.park_seconds or 0)

    @property
    def duration_ms(self) -> int | None:
        """From dispatch to result, in milliseconds."""
        if self.started_at is None or self.finished_at is None:
            return None
        return max(0, round((self.finished_at - self.started_at).total_seconds() * 1000))


class Waitpoint(ProtectedModel):
    """A question to the user about one invocation, for whose answer the run waits. A call of ``ask_user`` that needs an
    approval has two: first the approval, then the question. A waitpoint without an invocation says that credits or
    budget are not enough for the next step, which needs at least ``needed`` micro-credits; more credits answer it, too.
    """

    id = IdField(prefix="wp")
    run = models.ForeignKey(Run, models.CASCADE, related_name="waitpoints")
    invocation = models.ForeignKey(ToolInvocation, models.CASCADE, null=True, related_name="waitpoints", db_index=False)
    kind = models.CharField(max_length=20, choices=WaitpointKind.choices)
    status = models.CharField(max_length=10, choices=WaitpointStatus.choices, default=WaitpointStatus.PENDING)
    request_payload = JSONTextField()
    # The number of a question, if the server of the call's tool asks several.
    question = models.PositiveSmallIntegerField(default=0)
    needed = models.BigIntegerField(null=True)
    resolved_payload = JSONTextField(null=True)
    expires_at = models.DateTimeField()
    resolved_at = models.DateTimeField(null=True)
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["run"], condition=Q(status="PENDING"), name="waitpoint_one_pending_per_run"
            ),
            models.UniqueConstraint(fields=["invocation", "kind", "question"], name="waitpoint_one_of_a_kind_per_call"),
        ]
        indexes = [
            models.Index("expires_at", condition=Q(status="PENDING"), name="waitpoint_expiring"),
            models.Index("run", condition=Q(status="PENDING", needed__isnull=False), name="waitpoint_for_credits"),
        ]

    def __str__(self) -> str:
        return f"{self.kind} {self.id}"
