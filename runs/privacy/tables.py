"""Which tables hold data of a person, how its rows are found, and what an erasure does to them.

docs/privacy.md shows this table. A new table of the service must be added to both; a test compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from django.apps import apps
from django.db.models import Model, QuerySet

USER = "auth.User"
# (step, done, total): called after each batch.
Report = Callable[[str, int, int], object]


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
    """``field`` refers to the row of ``parent`` that a row belongs to. Without ``parent`` it is the person's id, or the
    username.

    ``hidden`` fields are secrets, or digests of secrets, which an export leaves out.
    """

    erasure: Erasure
    field: str = "user"
    parent: str = USER
    hidden: frozenset[str] = frozenset()


def _tables(erasure: Erasure, field: str, parent: str, *labels: str) -> dict[str, Table]:
    return {label: Table(erasure, field, parent) for label in labels}


TABLES: dict[str, Table] = {
    USER: Table(Erasure.RENAMED, "pk", "", frozenset({"password"})),
    **_tables(Erasure.DELETED, "user", USER, "auth.User_groups", "auth.User_user_permissions"),
    **_tables(Erasure.PSEUDONYM, "user", USER, "credits.Account"),
    **_tables(
        *(Erasure.PSEUDONYM, "account", "credits.Account", "credits.LedgerEntry", "credits.PendingExpiry"),
        *("credits.DayTotal", "credits.ChatTotal", "credits.ChatDayTotal", "credits.RunTotal"),
    ),
    **_tables(Erasure.DELETED, "user", USER, "chats.Chat", "chats.Attachment", "runs.Run"),
    **_tables(Erasure.DELETED, "chat", "chats.Chat", "chats.Message"),
    **_tables(
        *(Erasure.DELETED, "run", "runs.Run", "runs.Turn", "runs.ModelAttempt", "runs.ToolInvocation"),
        *("runs.Compaction", "runs.Waitpoint", "runs.RunEvent", "runs.RunMetadata"),
    ),
    "apikeys.ApiKey": Table(Erasure.DELETED, hidden=frozenset({"digest"})),
    "webhooks.Endpoint": Table(Erasure.DELETED, hidden=frozenset({"secret", "secondary_secret"})),
    **_tables(Erasure.DELETED, "endpoint", "webhooks.Endpoint", "webhooks.Delivery"),
    **_tables(Erasure.DELETED, "delivery", "webhooks.Delivery", "webhooks.Attempt"),
    "api.IdempotencyRecord": Table(Erasure.DELETED, hidden=frozenset({"fingerprint", "claim"})),
    "api.ErasedSubject": Table(Erasure.DIGEST, "digest", ""),
    # Staff only. The entries about a person's rows lose the names of these rows.
    "admin.LogEntry": Table(Erasure.RENAMED),
    # By username, which is what was typed in the form of the admin.
    **{
        label: Table(Erasure.DELETED, "username", "")
        for label in ("axes.AccessAttempt", "axes.AccessFailureLog", "axes.AccessLog")
    },
    **_tables(Erasure.DELETED, "access_attempt", "axes.AccessAttempt", "axes.AccessAttemptExpiration"),
    **{
        label: Table(Erasure.NONE)
        for label in (
            *("auth.Permission", "auth.Group", "auth.Group_permissions", "contenttypes.ContentType"),
            *("apikeys.ServerKey", "sessions.Session", "runs.Provider", "runs.ProviderUse"),
            *("runs.AgentModel", "runs.Tool", "runs.Agent", "runs.AgentVersion", "runs.Worker"),
        )
    },
}


def model_of(label: str) -> type[Model]:
    return apps.get_model(label, require_ready=False)


def children(parent: str) -> Iterator[tuple[str, Table]]:
    for label, table in TABLES.items():
        if table.parent == parent and table.erasure not in WITHOUT_ROWS:
            yield label, table


def rows_of(label: str, user: Any) -> QuerySet[Any]:
    """The person's rows of this table, except what the installation's webhook endpoint got of them."""
    table, path = TABLES[label], TABLES[label].field
    while table.parent:
        table = TABLES[table.parent]
        path += f"__{table.field}"
    value = user.get_username() if path.endswith("username") else user.pk
    return model_of(label)._base_manager.filter(**{path: value})
