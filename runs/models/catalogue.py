"""The catalogue: providers, their models, tools, and agents. Prices are micro-credits."""

from typing import Any

from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from config.database.protected import ProtectedModel
from config.kernel.encryption import EncryptedField
from config.kernel.jsontext import JSONTextField
from credits.usage import MODEL_KEY

# By a call of this tool, a model gives a run's output. No tool of the catalogue has this name.
OUTPUT_TOOL = "submit_output"
RESERVED_TOOL_NAMES = (MODEL_KEY, OUTPUT_TOOL)
PROVIDER_COST_MAX = 1000
PROVIDER_COST = Q(provider_cost_percent=None) | Q(
    provider_cost_percent__gte=0, provider_cost_percent__lte=PROVIDER_COST_MAX
)


def provider_cost_field() -> "models.FloatField[Any, Any]":
    return models.FloatField(
        "provider's cost in percent",
        null=True,
        blank=True,
        validators=[MinValueValidator(0), MaxValueValidator(PROVIDER_COST_MAX)],
        help_text="Of what users pay, for the cost and the margin in reports of staff. Empty: not known.",
    )


class Provider(models.Model):
    """A server with models. Empty fields of ``openai`` and ``anthropic`` are filled from the environment."""

    name = models.CharField(max_length=64, unique=True)
    kind = models.CharField(max_length=20)  # a name of ``runs.catalogue.definitions.KINDS``
    base_url = models.CharField("address", max_length=2048, default="", blank=True)
    # The address in the catalogue file, if it contains a variable.
    base_url_source = models.TextField(default="", blank=True, editable=False)
    api_key = EncryptedField("API key", null=True, blank=True)
    headers = EncryptedField(null=True, blank=True)  # a JSON object of header names to values
    # Limits over all workers.
    max_concurrent = models.PositiveIntegerField(
        "requests at the same time", null=True, blank=True, validators=[MinValueValidator(1)]
    )
    requests_per_minute = models.PositiveIntegerField(null=True, blank=True, validators=[MinValueValidator(1)])
    enabled = models.BooleanField(default=True)

    def __str__(self) -> str:
        return self.name


class ProviderUse(models.Model):
    """Who uses a provider with limits and who waits for it (``runs.llm.limits``)."""

    provider = models.CharField(max_length=64, unique=True)  # the provider's name
    document = models.JSONField(default=dict)


class AgentModel(models.Model):
    """A model that a run may request by ``name``. Prices are for 1,000 tokens."""

    name = models.CharField(max_length=100, unique=True)
    display_name = models.CharField(max_length=100)
    provider = models.ForeignKey(Provider, models.PROTECT, related_name="models")
    provider_model = models.CharField(max_length=200)
    price_in = models.BigIntegerField()
    price_out = models.BigIntegerField()
    # Prices of tokens that the provider reads from its cache, or writes to it; None means ``price_in``.
    price_cached_in = models.BigIntegerField(null=True, blank=True)
    price_cache_write = models.BigIntegerField(null=True, blank=True)
    provider_cost_percent = provider_cost_field()
    context_tokens = models.PositiveIntegerField(default=128_000, validators=[MinValueValidator(1000)])
    max_output_tokens = models.PositiveIntegerField(null=True, blank=True, validators=[MinValueValidator(1)])
    parameters = JSONTextField(default=dict, blank=True)  # see ``runs.catalogue.definitions``
    dialect = models.JSONField(default=dict, blank=True)  # see ``runs.catalogue.definitions``
    # The names of models that are asked, in this order, if this one fails.
    fallbacks = models.JSONField(default=list, blank=True)
    is_default = models.BooleanField(default=False)
    enabled = models.BooleanField(default=True)

    class Meta:
        verbose_name = "model"
        constraints = [
            models.UniqueConstraint(fields=["is_default"], condition=Q(is_default=True), name="model_one_default"),
            models.CheckConstraint(
                condition=Q(price_in__gte=0, price_out__gte=0)
                & (Q(price_cached_in=None) | Q(price_cached_in__gte=0))
                & (Q(price_cache_write=None) | Q(price_cache_write__gte=0)),
                name="model_prices_not_negative",
            ),
            models.CheckConstraint(condition=PROVIDER_COST, name="model_provider_cost_in_range"),
        ]

    def __str__(self) -> str:
        return self.name

    def save(self, **options: Any) -> None:
        """A new default replaces the present one. Call it in a transaction."""
        columns = options.get("update_fields")
        # If the column is not saved, the value may be old: another default may have been stored since it was read.
        if self.is_default and (columns is None or "is_default" in columns):
            AgentModel.objects.filter(is_default=True).exclude(pk=self.pk).update(is_default=False)
        super().save(**options)

    def validate_constraints(self, exclude: Any = None) -> None:
        # Django would refuse a new default: it checks the constraint before ``save`` replaces the present one.
        super().validate_constraints(exclude={*(exclude or ()), "is_default"})


class Tool(models.Model):
    """A tool that runs may call by ``name``. ``price``: micro-credits per call, estimate and maximum at once."""

    class Approval(models.TextChoices):
        THRESHOLD = "threshold", "when the estimate is over the run's threshold"
        ALWAYS = "always", "before every call"
        NEVER = "never", "never"

    name = models.CharField(max_length=64, unique=True)
    display_name = models.CharField(max_length=100)
    description = models.TextField()
    node_type = models.CharField(max_length=10)  # a name of ``runs.tools.dispatch.TYPES``
    input_schema = JSONTextField(default=dict, blank=True)
    price = models.BigIntegerField()
    provider_cost_percent = provider_cost_field()
    approval = models.CharField(max_length=10, choices=Approval.choices, default=Approval.THRESHOLD)
    timeout_seconds = models.FloatField(null=True, blank=True)
    # Whether a call whose outcome was lost with its worker may be repeated, with the same idempotency key.
    repeatable = models.BooleanField(default=False)
    # The address: for an http tool that of its calls, for an mcp tool that of its server.
    url = models.CharField(max_length=2048, default="", blank=True)
    # The address in the catalogue file, if it contains a variable.
    url_source = models.TextField(default="", blank=True, editable=False)
    # An mcp tool's name on its server; empty if it is the same.
    remote_name = models.CharField(max_length=200, default="", blank=True)
    # The headers that authenticate this service at the address: a JSON object of header names to values.
    secret_headers = EncryptedField(null=True, blank=True)
    # Signs the calls of an http tool: base64, optionally after "whsec_" (Standard Webhooks).
    signing_secret = EncryptedField(null=True, blank=True)
    # Seconds for which a call may await the tool's later outcome; None: the answer to the request is the outcome.
    park_seconds = models.PositiveIntegerField(null=True, blank=True)
    # The address that is told if the outcome of such a call is no longer wanted.
    cancel_url = models.CharField("address for cancels", max_length=2048, default="", blank=True)
    cancel_url_source = models.TextField(default="", blank=True, editable=False)
    # Whether callbacks need no signature although the tool has a signing secret.
    unsigned_callbacks = models.BooleanField(default=False)
    enabled = models.BooleanField(default=True)

    class Meta:
        constraints = [
            models.CheckConstraint(condition=Q(price__gte=0), name="tool_price_not_negative"),
            models.CheckConstraint(condition=PROVIDER_COST, name="tool_provider_cost_in_range"),
            models.CheckConstraint(
                condition=~Q(name__in=RESERVED_TOOL_NAMES),
                name="tool_name_not_reserved",
                violation_error_message=f"No tool can be named {' or '.join(RESERVED_TOOL_NAMES)}.",
            ),
        ]

    def __str__(self) -> str:
        return self.name


class Agent(models.Model):
    """An agent by whose name runs are started. A run gets one of its versions. Agents are never renamed or deleted,
    because runs name them. ``runs.catalogue.agents`` writes this table and that of the versions.
    """

    name = models.CharField(max_length=64, unique=True)
    display_name = models.CharField(max_length=100)
    description = models.TextField(default="", blank=True)
    enabled = models.BooleanField(default=True)
    version = models.PositiveIntegerField(default=0)  # the number of the current version, for runs that name no version

    def __str__(self) -> str:
        return self.name


class TypicalCredits(models.Model):
    """What the runs of an agent or a model usually cost (``runs.catalogue.typical``)."""

    kind = models.CharField(max_length=5)
    name = models.CharField(max_length=100)
    p50 = models.BigIntegerField()
    p90 = models.BigIntegerField()
    runs = models.PositiveIntegerField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["kind", "name"], name="typical_credits_once_per_name")]


class OnCreditsExhausted(models.TextChoices):
    """What a run does if credits or budget are not enough for its next step."""

    FAIL = "fail", "fail"
    WAIT = "wait", "wait for more"


class AgentVersion(ProtectedModel):
    """What an agent gives to its runs. Written once: a change of the agent makes a new row, and runs keep theirs."""

    agent = models.ForeignKey(Agent, models.PROTECT, related_name="versions", db_index=False)
    number = models.PositiveIntegerField()  # from 1, for each agent
    instructions = models.TextField(default="", blank=True)
    model = models.CharField(max_length=100, null=True, blank=True)  # the name of a model; None for the default one
    tools = models.JSONField(null=True, blank=True)  # names; None for all tools
    # Override the model's own parameters; see ``runs.catalogue.definitions``.
    parameters = JSONTextField(default=dict, blank=True)
    credit_approval_threshold = models.BigIntegerField(null=True, blank=True)
    max_credits = models.BigIntegerField(null=True, blank=True)
    on_credits_exhausted = models.CharField(
        max_length=4, choices=OnCreditsExhausted.choices, default=OnCreditsExhausted.FAIL
    )
    output_schema = JSONTextField(null=True, blank=True)  # the JSON Schema of the output
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        ordering = ["agent", "-number"]
        constraints = [models.UniqueConstraint(fields=["agent", "number"], name="agent_version_once_per_number")]

    def __str__(self) -> str:
        return self.reference

    @property
    def name(self) -> str:
        return self.agent.name

    @property
    def reference(self) -> str:
        return f"{self.name}@{self.number}"


# All columns are protected, and no module takes the key to them. So rows never change.
AgentVersion.protected_fields = frozenset(column.name for column in AgentVersion._meta.concrete_fields)
