"""Which tables hold data of a person, how its rows are found, and what an erasure does to them.

docs/privacy.md shows this table. A new table of the service must be added to both; a test compares them.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from django.apps import apps
from django.db.models import Model, QuerySet

from webhooks.models import Delivery

USER = "auth.User"
# (step, done, total): called after each batch.
Report = Callable[[str, int, int], object]
# Deliveries that are searched together.
BATCH = 1000


class Erasure(StrEnum):
    """What an erasure does to a person's rows of a table."""

    DELETED = "deleted"
    PSEUDONYM = "kept, under a pseudonym"
    DIGEST = "kept, as a keyed digest"
    RENAMED = "kept, without names"
    NONE = "no data of users"


WITHOUT_ROWS = {Erasure.NONE, Erasure.DIGEST}


@dataclass(frozen=True)
class Table:
    """``path`` leads from a row to the person, or to the username. ``hidden`` fields are secrets or digests of secrets,
    which an export leaves out.
    """

    erasure: Erasure
    path: str = "user"
    hidden: frozenset[str] = frozenset()


def _tables(erasure: Erasure, path: str, *labels: str) -> dict[str, Table]:
    return dict.fromkeys(labels, Table(erasure, path))


TABLES: dict[str, Table] = {
    USER: Table(Erasure.RENAMED, "pk", frozenset({"password"})),
    **_tables(Erasure.DELETED, "user", "auth.User_groups", "auth.User_user_permissions"),
    **_tables(Erasure.PSEUDONYM, "user", "credits.Account"),
    **_tables(Erasure.PSEUDONYM, "account__user", "credits.LedgerEntry", "credits.PendingExpiry", "credits.DayTotal"),
    **_tables(Erasure.PSEUDONYM, "account__user", "credits.ChatTotal", "credits.ChatDayTotal", "credits.RunTotal"),
    **_tables(Erasure.DELETED, "user", "chats.Chat", "chats.Attachment", "runs.Run"),
    **_tables(Erasure.DELETED, "chat__user", "chats.Message"),
    **_tables(Erasure.DELETED, "run__user", "runs.Turn", "runs.ModelAttempt"),
    # The id of a task is the key to it.
    "runs.ToolInvocation": Table(Erasure.DELETED, "run__user", frozenset({"remote_task"})),
    **_tables(Erasure.DELETED, "run__user", "runs.Compaction", "runs.Waitpoint", "runs.RunEvent", "runs.RunMetadata"),
    **_tables(Erasure.DELETED, "run__user", "runs.ClientRun"),
    "apikeys.ApiKey": Table(Erasure.DELETED, hidden=frozenset({"digest"})),
    "webhooks.Endpoint": Table(Erasure.DELETED, hidden=frozenset({"secret", "secondary_secret"})),
    **_tables(Erasure.DELETED, "endpoint__user", "webhooks.Delivery"),
    **_tables(Erasure.DELETED, "delivery__endpoint__user", "webhooks.Attempt"),
    "api.IdempotencyRecord": Table(Erasure.DELETED, hidden=frozenset({"fingerprint", "claim"})),
    **_tables(Erasure.DIGEST, "digest", "api.ErasedSubject"),
    # Staff only. The entries about a person's rows lose the names of these rows.
    **_tables(Erasure.RENAMED, "user", "admin.LogEntry"),
    # By username, which is what was typed in the form of the admin.
    **_tables(Erasure.DELETED, "username", "axes.AccessAttempt", "axes.AccessFailureLog", "axes.AccessLog"),
    **_tables(Erasure.DELETED, "access_attempt__username", "axes.AccessAttemptExpiration"),
    **_tables(Erasure.NONE, "", "auth.Permission", "auth.Group", "auth.Group_permissions", "contenttypes.ContentType"),
    **_tables(Erasure.NONE, "", "apikeys.ServerKey", "sessions.Session", "runs.Provider", "runs.ProviderUse"),
    **_tables(Erasure.NONE, "", "runs.CountedBeginning", "runs.TypicalCredits"),
    **_tables(Erasure.NONE, "", "runs.AgentModel", "runs.Tool", "runs.Agent", "runs.AgentVersion", "runs.Worker"),
}


def model_of(label: str) -> type[Model]:
    return apps.get_model(label, require_ready=False)


def reference(label: str) -> tuple[str, str]:
    """The field by which a row belongs to a row of another table, and that table. Both are empty if there is none."""
    field = TABLES[label].path.partition("__")[0]
    if field in ("", "pk") or (parent := model_of(label)._meta.get_field(field).related_model) is None:
        return "", ""
    return field, parent._meta.label


def rows_of(label: str, user: Any) -> QuerySet[Any]:
    """The person's rows of this table, except what the installation's webhook endpoint got of them."""
    path = TABLES[label].path
    value = user.get_username() if path.endswith("username") else user.pk
    return model_of(label)._base_manager.filter(**{path: value})


def of_installation(user: Any, report: Report | None = None) -> Iterator[QuerySet[Delivery]]:
    """What the installation's webhook endpoint got of the person, in batches. Runs may be purged, and there is no index
    of names in bodies.
    """
    ending = f'"userId":{json.dumps(user.get_username(), ensure_ascii=False)}}}'
    after, seen = "", 0
    installation = Delivery.objects.filter(user=None)
    while batch := list(installation.filter(pk__gt=after).order_by("pk").values_list("pk", "body")[:BATCH]):
        after, seen = batch[-1][0], seen + len(batch)
        if mine := [key for key, body in batch if body.endswith(ending)]:
            yield installation.filter(pk__in=mine)
        if report is not None:
            report("deliveries searched", seen, seen)
