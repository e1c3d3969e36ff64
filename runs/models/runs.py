"""Runs, their workers, their streams' events, and clients' ids of runs. Only ``runs.lifecycle`` writes a status."""

from django.conf import settings
from django.db import models
from django.db.models import Q
from django.db.models.functions import Coalesce, Now

from chats.models import Chat
from config.database.protected import ProtectedModel
from config.kernel.choices import StatusChoices
from config.kernel.ids import IdField, RefField
from config.kernel.jsontext import JSONTextField


class RunStatus(StatusChoices):
    QUEUED = "queued", "default", False
    RUNNING = "running", "info", False
    WAITING = "waiting", "warning", False
    COMPLETED = "completed", "success", True
    FAILED = "failed", "danger", True
    CANCELLED = "cancelled", "default", True


class Awaiting(models.TextChoices):
    """Who gives the outcome of an open tool call, without a worker of this service."""

    TOOL = "tool", "its tool"
    CLIENT = "client", "the caller's app"


FINAL_RUN_STATUSES = [status for status in RunStatus if status.final]
LIVE_RUN_STATUSES = [status for status in RunStatus if not status.final]

# The model by which callers find a run: the one that answered last, or before the first execution the requested one.
MODEL_OF_RUN = Coalesce("resolved_model", "requested_model")
HAS_MODEL_OF_RUN = Q(resolved_model__isnull=False) | Q(requested_model__isnull=False)

# Runs that lost their worker, and parked ones that may resume; and runs whose owner is to cancel them.
TO_TAKE_OVER = Q(status="running", worker_id__isnull=True, due_at__isnull=False)
TO_CANCEL = Q(status="running", cancel_requested_at__isnull=False)
AGE = ("created_at", "id")  # the order of a user's runs in lists


class Worker(models.Model):
    """A run worker process. Its heartbeat renews the lease of all its runs at once."""

    id = IdField(prefix="wrk")
    host = models.CharField(max_length=255)
    pid = models.PositiveIntegerField()
    expires_at = models.DateTimeField(db_index=True)
    created_at = models.DateTimeField(db_default=Now())


class Run(ProtectedModel):
    """While a run is running, ``worker_id`` names the process that owns it, and ``lease_token`` fences the writes of
    that process: each owner increments the token, and a write with an older token changes nothing. Any worker may take
    over a running run without ``worker_id``, unless it is ``parked``.
    """

    protected_fields = frozenset({"status", "parked", "worker_id", "lease_token"})

    id = IdField(prefix="run")
    chat = models.ForeignKey(Chat, models.CASCADE, related_name="runs", db_index=False)
    user = models.ForeignKey(settings.AUTH_USER_MODEL, models.CASCADE, related_name="runs", db_index=False)
    status = models.CharField(max_length=10, choices=RunStatus.choices, default=RunStatus.QUEUED)
    blocked = models.BooleanField(default=False)  # queued behind another run of the chat
    # Waits because the user has RUN_USER_LIMIT running runs; when one of them ends, the oldest throttled run starts.
    throttled = models.BooleanField(default=False)
    # A running run that has given up its worker and its place of RUN_USER_LIMIT, because all its open calls await
    # outcomes from outside. It may be claimed again when it is due.
    parked = models.BooleanField(default=False)
    # ``client`` if an open call awaits the caller's app; otherwise ``tool`` if an open call awaits its tool.
    awaiting = models.CharField(max_length=6, choices=Awaiting.choices, null=True)
    user_message_id = RefField()
    assistant_message_id = RefField(null=True)
    requested_model = models.CharField(max_length=100, null=True)
    resolved_model = models.CharField(max_length=100, null=True)
    # The version of an agent, ``name@3``, and the agent's name, for lists.
    agent = models.CharField(max_length=80, null=True)
    agent_name = models.CharField(max_length=64, null=True)
    instructions = models.TextField(null=True)  # appended to the agent's instructions
    tools = models.JSONField(null=True)
    # The tools that the caller's app executes: ``[{"name", "description", "inputSchema"}]``.
    client_tools = JSONTextField(null=True)
    credit_approval_threshold = models.BigIntegerField(null=True)
    max_credits = models.BigIntegerField(null=True)
    # Whether the run waits, instead of failing, if credits or budget are not enough for a step.
    waits_for_credits = models.BooleanField(default=False)
    metadata = JSONTextField(default=dict)  # the caller's own pairs of text; ``RunMetadata`` repeats them for lists
    output_schema = JSONTextField(null=True)  # the JSON Schema of the output; it replaces the agent's schema
    output = JSONTextField(null=True)
    # The run that replaced this one, or an earlier run of the chat and so this one, too.
    replaced_by = RefField(null=True)
    request_id = models.CharField(max_length=128, default="")
    # The trace span of the request that started the run, for workers that find the run without a message.
    trace_parent = models.CharField(max_length=55, null=True)
    tool_invocation_count = models.PositiveIntegerField(default=0)  # counted here, because a page of runs shows it
    last_stream_index = models.PositiveIntegerField(default=0)
    # Whether the stream has text that no recorded turn holds; the next owner then sends message.reset.
    unrecorded_text = models.BooleanField(default=False)
    cancel_requested_at = models.DateTimeField(null=True)
    error_code = models.CharField(max_length=40, null=True)
    error_message = models.TextField(null=True)
    # Why it failed, for staff: a ``runs.errors.FailureReason``.
    failure_reason = models.CharField(max_length=40, null=True)
    # The reason of the turn that completed the run: ``stop`` or ``length``.
    finish_reason = models.CharField(max_length=10, null=True)
    # What cut the answer: the ``model``'s own output limit, or a lower one by the ``budget`` or the ``credits``.
    limited_by = models.CharField(max_length=10, null=True)
    # Sums over the turns, because a page of runs shows them.
    input_tokens = models.PositiveBigIntegerField(default=0)
    cached_input_tokens = models.PositiveBigIntegerField(default=0)
    output_tokens = models.PositiveBigIntegerField(default=0)
    turn_count = models.PositiveIntegerField(default=0)
    model_retries = models.PositiveIntegerField(default=0)
    created_at = models.DateTimeField(db_default=Now())
    updated_at = models.DateTimeField(db_default=Now())
    started_at = models.DateTimeField(null=True)
    finished_at = models.DateTimeField(null=True)
    ran_ms = models.BigIntegerField(default=0)  # the running time before ``running_since``
    running_since = models.DateTimeField(null=True)
    worker_id = RefField(null=True)
    lease_token = models.PositiveIntegerField(default=0)
    lease_losses = models.PositiveSmallIntegerField(default=0)
    # When a step that waits for credits last looked; NULL once it waits no longer.
    credits_wanted_at = models.DateTimeField(null=True)
    due_at = models.DateTimeField(null=True, db_default=Now())  # when the sweep may nudge a worker again

    class Meta:
        ordering = ["-created_at", "-id"]
        permissions = [
            ("cancel_run", "Can cancel runs"),
            ("read_run_content", "Can read the messages, inputs and results of runs"),
        ]
        constraints = [
            # A chat has at most one running or waiting run: only queued runs are blocked.
            models.UniqueConstraint(
                fields=["chat"],
                condition=Q(status__in=LIVE_RUN_STATUSES, blocked=False),
                name="run_one_unblocked_per_chat",
            ),
            models.CheckConstraint(condition=Q(status="queued") | Q(blocked=False), name="run_blocked_only_if_queued"),
            models.CheckConstraint(
                condition=Q(status="running", worker_id=None) | Q(parked=False), name="run_parked_only_if_running"
            ),
        ]
        indexes = [
            # With ``replaced_by``, so that a list without replaced runs need not read their rows.
            models.Index("chat", *AGE, "replaced_by", name="run_by_chat"),
            models.Index("user", *AGE, "replaced_by", name="run_by_user"),
            models.Index("user", "status", *AGE, name="run_by_user_status"),
            models.Index("user", MODEL_OF_RUN, *AGE, condition=HAS_MODEL_OF_RUN, name="run_by_user_model"),
            models.Index("user", "agent_name", *AGE, condition=Q(agent_name__isnull=False), name="run_by_user_agent"),
            models.Index("user", "agent", *AGE, condition=Q(agent__isnull=False), name="run_by_user_agent_version"),
            models.Index("agent", "id", condition=Q(agent__isnull=False), name="run_by_agent_version"),
            # For the lists of the admin, and the oldest run in a status: ids are in the order of creation.
            models.Index("status", "id", name="run_by_status"),
            models.Index("error_code", "id", condition=Q(error_code__isnull=False), name="run_by_error"),
            models.Index("due_at", condition=Q(status="queued", blocked=False), name="run_due"),
            models.Index("due_at", condition=TO_TAKE_OVER, name="run_to_take_over"),
            models.Index("id", condition=Q(parked=True), name="run_parked"),
            models.Index("user", *AGE, condition=Q(throttled=True), name="run_throttled"),
            models.Index("user", "awaiting", *AGE, condition=Q(awaiting__isnull=False), name="run_by_user_awaiting"),
            models.Index("user", *AGE, condition=Q(credits_wanted_at__isnull=False), name="run_wants_credits"),
            models.Index("chat", "created_at", condition=Q(blocked=True), name="run_in_line"),
            models.Index("worker_id", condition=Q(status="running"), name="run_by_worker"),
            models.Index("worker_id", condition=TO_CANCEL, name="run_cancel_by_worker"),
        ]

    def __str__(self) -> str:
        return self.id

    @property
    def is_over(self) -> bool:
        return self.status in FINAL_RUN_STATUSES


class RunMetadata(models.Model):
    """A pair of a run's metadata, for lists. With the columns of the run by which one index has a list's order."""

    PAIRS_MAX, KEY_MAX_CHARS, VALUE_MAX_CHARS = 16, 64, 512

    run = models.ForeignKey(Run, models.CASCADE, related_name="metadata_pairs", db_index=False)
    user = models.ForeignKey(settings.AUTH_USER_MODEL, models.CASCADE, related_name="+", db_index=False)
    key = models.CharField(max_length=KEY_MAX_CHARS)
    value = models.CharField(max_length=VALUE_MAX_CHARS)
    created_at = models.DateTimeField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["run", "key"], name="run_metadata_once_per_key")]
        indexes = [models.Index("user", "key", "value", "created_at", "run", name="run_metadata_by_value")]


class RunEvent(models.Model):
    """An event of the run's stream, indexed from 1 without gaps. ``data`` is the JSON text that clients receive."""

    run = models.ForeignKey(Run, models.CASCADE, related_name="events", db_index=False)
    index = models.PositiveIntegerField()
    type = models.CharField(max_length=30)
    data = models.TextField()
    final = models.BooleanField(default=False)  # the last event of a run that has ended
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        ordering = ["run", "index"]
        constraints = [models.UniqueConstraint(fields=["run", "index"], name="event_once_per_index")]


class ClientRun(models.Model):
    """The run that a client's request started; a repeated request starts nothing. ``key`` is the digest of the client's
    id of the request. ``index``: the stream of the request begins after this event. ``run`` changes when another run
    replaces it. ``message_id`` is the client's id of the user's message, if the protocol repeats messages.
    """

    MESSAGE_ID_MAX_CHARS = 128

    chat = models.ForeignKey(Chat, models.CASCADE, related_name="client_runs", db_index=False)
    run = models.ForeignKey(Run, models.CASCADE, related_name="client_runs")
    key = models.CharField(max_length=64)
    index = models.PositiveIntegerField(default=0)
    message_id = models.CharField(max_length=MESSAGE_ID_MAX_CHARS, default="")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["chat", "key"], name="client_run_once_per_key")]
