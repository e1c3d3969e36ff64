"""The filters of run lists: how callers write them, and which rows match them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

from django.db import OperationalError, transaction
from django.db.models import Q, QuerySet
from django.utils.datastructures import MultiValueDict
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter

from chats.views import REPLACED
from config.api.pagination import stored_forms
from config.database.batches import limit_statements
from config.kernel import clock
from config.kernel.errors import ValidationFailed
from runs import models
from runs.models import Run, RunMetadata, RunStatus
from runs.serializers import METADATA_KEY, METADATA_SCHEMA

SECONDS = 5  # the time limit, for the worst combination of filters over a user's millions of runs
QUERY_CANCELED = "57014"
NAME_MAX_CHARS = 100
NAME = {"type": "string", "minLength": 1, "maxLength": NAME_MAX_CHARS}
METADATA = "metadata"
MILLISECOND = timedelta(milliseconds=1)
LATEST = datetime.max.replace(tzinfo=UTC)
PARAMETERS = [
    REPLACED,
    OpenApiParameter(
        "status",
        {"type": "array", "items": {"type": "string", "enum": RunStatus.values}, "minItems": 1},
        style="form",
        explode=False,
        description="Only runs in one of these statuses, separated by commas.",
    ),
    OpenApiParameter(
        "agent", NAME, description="Only runs with this agent, `name`, or with this version of it, `name@3`."
    ),
    OpenApiParameter(
        "model",
        NAME,
        description="Only runs whose `resolvedModel` this is, or whose `requestedModel`, until they first execute.",
    ),
    OpenApiParameter(
        "awaiting",
        enum=models.Awaiting.values,
        description="Only runs with open tool calls that await the caller's app (`client`), or with none of these but "
        "some that await their tools (`tool`).",
    ),
    OpenApiParameter("createdAfter", OpenApiTypes.DATETIME, description="Only runs that were created later."),
    OpenApiParameter("createdBefore", OpenApiTypes.DATETIME, description="Only runs that were created earlier."),
    OpenApiParameter(
        METADATA,
        METADATA_SCHEMA
        | {
            "propertyNames": {"pattern": rf"^{METADATA}\.{METADATA_KEY.pattern}$"},
            "additionalProperties": METADATA_SCHEMA["additionalProperties"] | {"pattern": r"^[^\u0000]*$"},
        },
        style="form",
        explode=True,
        description="Only runs with these pairs of metadata: each is a parameter, `metadata.KEY=VALUE`.",
    ),
]


def filtered(runs: QuerySet[Run], query: MultiValueDict[str, str], user_id: int) -> QuerySet[Run]:
    """The ``runs`` that match the filters of ``query``. They must belong to the user. Raises ValidationFailed."""
    runs, problems = runs.alias(model_of_run=models.MODEL_OF_RUN), dict[str, list[str]]()
    if query.get(REPLACED.name) != "true":
        runs = runs.filter(replaced_by=None)
    for name, read in READERS.items():
        if name in query:
            # Some clients repeat the parameter of an array instead of separating the values by commas.
            text = ",".join(query.getlist(name)) if name == "status" else query.getlist(name)[-1]
            try:
                runs = runs.filter(read(text))
            except ValueError as error:
                problems[name] = [str(error)]
    names = [name for name in query if name.startswith(METADATA)]
    if len(names) > models.RunMetadata.PAIRS_MAX:
        raise ValidationFailed({METADATA: [f"At most {models.RunMetadata.PAIRS_MAX} pairs."]})
    for name in names:
        key, (value, *more) = name.removeprefix(f"{METADATA}."), query.getlist(name)
        if key == name or not METADATA_KEY.fullmatch(key) or more:
            problems[name[:100]] = ["Use metadata.KEY=VALUE, each key once."]
        elif len(value) > models.RunMetadata.VALUE_MAX_CHARS or "\0" in value:
            problems[name] = [f"A value is text of at most {models.RunMetadata.VALUE_MAX_CHARS} characters."]
        else:
            runs = runs.filter(pk__in=RunMetadata.objects.filter(user=user_id, key=key, value=value).values("run"))
    if problems:
        raise ValidationFailed(problems)
    return runs


@contextmanager
def limited(query: MultiValueDict[str, str]) -> Iterator[None]:
    """Raises ValidationFailed if the filters together take longer than SECONDS on PostgreSQL."""
    if not any(name in READERS or name.startswith(METADATA) for name in query):
        yield  # a list without filters reads one index
        return
    try:
        with transaction.atomic():
            limit_statements(SECONDS)
            yield
    except OperationalError as error:
        if getattr(error.__cause__, "sqlstate", None) != QUERY_CANCELED:
            raise
        hint = "Few runs match all filters. Name a shorter time by createdAfter and createdBefore, or fewer filters."
        raise ValidationFailed({"filters": [hint]}) from None


def _statuses(text: str) -> Q:
    statuses = set(text.split(","))
    if not statuses <= set(RunStatus.values):
        raise ValueError(f"Use one or more of {', '.join(RunStatus.values)}, separated by commas.")
    return Q() if len(statuses) == len(RunStatus.values) else Q(status__in=statuses)


def _name(text: str, what: str) -> str:
    if not 0 < len(text) <= NAME_MAX_CHARS or "\0" in text:
        raise ValueError(f"Use the name of {what}.")
    return text


def _after(text: str) -> Q:
    return Q(created_at__gte=stored_forms(min(_moment(text), LATEST - MILLISECOND) + MILLISECOND)[0])


def _moment(text: str) -> datetime:
    return clock.moment_of(text, "such as 2026-11-20T12:34:56.789Z")


READERS: dict[str, Callable[[str], Q]] = {
    "awaiting": lambda text: Q(awaiting=text),
    "status": _statuses,
    "agent": lambda text: Q(**{"agent" if "@" in text else "agent_name": _name(text, "an agent, or name@3")}),
    "model": lambda text: models.HAS_MODEL_OF_RUN & Q(model_of_run=_name(text, "a model")),
    "createdAfter": _after,
    "createdBefore": lambda text: Q(created_at__lt=stored_forms(_moment(text))[0]),
}
