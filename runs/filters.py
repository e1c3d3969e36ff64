"""The filters of run lists: how callers write them, and the rows that they leave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import reduce
from operator import or_
from typing import Any

from django.db.models import Count, OuterRef, Q, QuerySet, Subquery
from django.utils.datastructures import MultiValueDict
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter

from config.api.pagination import stored_forms
from config.kernel.errors import ValidationFailed
from runs.models import (
    HAS_MODEL_OF_RUN,
    LIVE_RUN_STATUSES,
    METADATA_PAIRS_MAX,
    METADATA_VALUE_MAX_CHARS,
    MODEL_OF_RUN,
    Run,
    RunMetadata,
    RunStatus,
)
from runs.search import Entries, Found, Place, find, merged
from runs.serializers import METADATA_KEY

AGENT_MAX_CHARS = 100
METADATA = "metadata"
MODEL_NAME_MAX_CHARS = 100
MILLISECOND = timedelta(milliseconds=1)
LATEST = datetime.max.replace(tzinfo=UTC)
PARAMETERS = [
    OpenApiParameter(
        "status",
        {"type": "array", "items": {"type": "string", "enum": RunStatus.values}, "minItems": 1},
        style="form",
        explode=False,
        description="Only runs in one of these statuses, separated by commas.",
    ),
    OpenApiParameter(
        "agent",
        {"type": "string", "minLength": 1, "maxLength": AGENT_MAX_CHARS},
        description="Only runs with this agent, `name`, or with this version of it, `name@3`.",
    ),
    OpenApiParameter(
        "model",
        {"type": "string", "minLength": 1, "maxLength": MODEL_NAME_MAX_CHARS},
        description="Only runs whose `resolvedModel` this is, or whose `requestedModel`, until they first execute.",
    ),
    OpenApiParameter("createdAfter", OpenApiTypes.DATETIME, description="Only runs that were created later."),
    OpenApiParameter("createdBefore", OpenApiTypes.DATETIME, description="Only runs that were created earlier."),
    OpenApiParameter(
        METADATA,
        {
            "type": "object",
            "propertyNames": {"pattern": rf"^{METADATA}\.{METADATA_KEY.pattern}$"},
            "additionalProperties": {
                "type": "string",
                "maxLength": METADATA_VALUE_MAX_CHARS,
                "pattern": r"^[^\u0000]*$",
            },
            "maxProperties": METADATA_PAIRS_MAX,
        },
        style="form",
        explode=True,
        description="Only runs with these pairs of metadata: each is a parameter, `metadata.KEY=VALUE`.",
    ),
]


@dataclass
class RunFilters:
    """The filters of one user's runs, or of a chat's. ``after`` and ``before`` are whole milliseconds, as callers see
    times: the first included, the second excluded.
    """

    user_id: int
    chat_id: str | None = None
    statuses: list[str] = field(default_factory=list)
    agent: str | None = None
    model: str | None = None
    after: datetime | None = None
    before: datetime | None = None
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def bounds(self) -> dict[str, Any]:
        bounds: dict[str, Any] = {}
        if self.after is not None:
            bounds["created_at__gte"] = stored_forms(self.after)[0]
        if self.before is not None:
            bounds["created_at__lt"] = stored_forms(self.before)[0]
        return bounds

    @property
    def needs_search(self) -> bool:
        """Whether no index has exactly these runs in the order of the list."""
        return bool(self.statuses or self.agent or self.model or self.metadata)

    def find(self, runs: QuerySet[Run], place: Place | None, limit: int) -> Found:
        """One status after the other: no index has the runs of several in the order of the list.

        A run that moves meanwhile is neither missed nor found twice. The live statuses, of which a user has few runs,
        are read first and by the same statement; a run that ends later is found again and counts once.
        """
        live = [status for status in self.statuses if status in LIVE_RUN_STATUSES]
        parts = [live] if live or not self.statuses else []
        parts += [[status] for status in self.statuses if status not in live]
        if self.metadata:
            runs = runs.alias(pairs=self._number_of_pairs()).filter(pairs=len(self.metadata))
        runs = self._of_model(self._of_agent(runs.filter(**self.bounds)))
        # Of the entries that a page may read: one with many pairs takes longer to check.
        share = len(parts) * (1 + len(self.metadata) // 4)
        found = []
        for statuses in parts:
            matching = runs.filter(status__in=statuses) if statuses else runs
            found.append(find(self.user_id, self._entries(statuses), matching, place, limit + 1, share))
        return merged(found, limit)

    def _entries(self, statuses: list[str]) -> list[Entries]:
        """Of each filter that has an index."""
        runs = Run.objects.filter(user=self.user_id, **self.bounds)
        entries = []
        if self.chat_id is not None:
            entries.append(Entries([runs.filter(chat=self.chat_id)]))
        if statuses:
            entries.append(Entries([runs.filter(status=status) for status in statuses]))
        if self.agent is not None:
            entries.append(Entries([self._of_agent(runs)]))
        if self.model is not None:
            entries.append(Entries([self._of_model(runs)]))
        pairs = RunMetadata.objects.filter(user=self.user_id, **self.bounds)
        return entries + [
            Entries([pairs.filter(key=key, value=value)], "run_id") for key, value in self.metadata.items()
        ]

    def _of_agent(self, runs: QuerySet[Run]) -> QuerySet[Run]:
        if self.agent is None:
            return runs
        return runs.filter(**{"agent" if "@" in self.agent else "agent_name": self.agent})

    def _of_model(self, runs: QuerySet[Run]) -> QuerySet[Run]:
        if self.model is None:
            return runs
        return runs.alias(model_of_run=MODEL_OF_RUN).filter(HAS_MODEL_OF_RUN, model_of_run=self.model)

    def _number_of_pairs(self) -> Subquery:
        """How many of the pairs a run has. One join a pair would take long to plan."""
        given = reduce(or_, (Q(key=key, value=value) for key, value in self.metadata.items()))
        pairs = RunMetadata.objects.filter(given, run=OuterRef("pk")).values("run")
        return Subquery(pairs.annotate(number=Count("*")).values("number"))


def read_filters(query: MultiValueDict[str, str], user_id: int, chat_id: str | None = None) -> RunFilters:
    """Raises ValidationFailed."""
    filters, problems = RunFilters(user_id, chat_id), dict[str, list[str]]()
    for name, read in READERS.items():
        if name in query:
            try:
                # Clients that repeat the parameter of an array mean the same as those that write commas.
                read(filters, ",".join(query.getlist(name)) if name == "status" else query.getlist(name)[-1])
            except ValueError as error:
                problems[name] = [str(error)]
    names = [name for name in query if name.startswith(METADATA)]
    if len(names) > METADATA_PAIRS_MAX:
        raise ValidationFailed({METADATA: [f"At most {METADATA_PAIRS_MAX} pairs."]})
    for name in names:
        key, (value, *more) = name.removeprefix(f"{METADATA}."), query.getlist(name)
        if key == name or not METADATA_KEY.fullmatch(key) or more:
            problems[name[:100]] = ["Use metadata.KEY=VALUE, each key once."]
        elif len(value) > METADATA_VALUE_MAX_CHARS or "\0" in value:
            problems[name] = [f"A value is text of at most {METADATA_VALUE_MAX_CHARS} characters."]
        else:
            filters.metadata[key] = value
    if problems:
        raise ValidationFailed(problems)
    return filters


def _statuses(filters: RunFilters, text: str) -> None:
    statuses = dict.fromkeys(text.split(","))
    if not statuses.keys() <= set(RunStatus.values):
        raise ValueError(f"Use one or more of {', '.join(RunStatus.values)}, separated by commas.")
    filters.statuses = [] if len(statuses) == len(RunStatus.values) else list(statuses)


def _agent(filters: RunFilters, text: str) -> None:
    if not 0 < len(text) <= AGENT_MAX_CHARS or "\0" in text:
        raise ValueError("Use the name of an agent, or name@3.")
    filters.agent = text


def _model(filters: RunFilters, text: str) -> None:
    if not 0 < len(text) <= MODEL_NAME_MAX_CHARS or "\0" in text:
        raise ValueError("Use the name of a model.")
    filters.model = text


def _after(filters: RunFilters, text: str) -> None:
    filters.after = min(_moment(text), LATEST - MILLISECOND) + MILLISECOND


def _before(filters: RunFilters, text: str) -> None:
    filters.before = _moment(text)


def _moment(text: str) -> datetime:
    problem = ValueError("Use a time such as 2026-11-20T12:34:56.789Z.")
    try:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is None:
            raise problem
        moment = moment.astimezone(UTC)
    except (ValueError, OverflowError):
        raise problem from None
    return moment - timedelta(microseconds=moment.microsecond % 1000)


READERS: dict[str, Callable[[RunFilters, str], None]] = {
    "status": _statuses,
    "agent": _agent,
    "model": _model,
    "createdAfter": _after,
    "createdBefore": _before,
}
