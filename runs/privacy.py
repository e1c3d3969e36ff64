"""What is kept of a person: the table of all tables (a test compares docs/privacy.md), the export and the erasure."""

import base64
import json
import re
import secrets
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

from django.apps import apps
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.auth import get_user_model
from django.contrib.auth.hashers import make_password
from django.contrib.contenttypes.models import ContentType
from django.core.files.storage import default_storage
from django.db import transaction
from django.db.models import Model, QuerySet

from chats import attachments, files
from chats.models import Chat
from chats.services import chats_of, delete_chat, purge_chat
from config.api.models import ErasedSubject
from config.kernel import clock
from config.kernel.errors import Conflict
from config.kernel.jsontext import to_text
from runs import services
from runs.models import InvocationStatus, ToolInvocation
from runs.tools import files as tool_files
from webhooks.models import Delivery
from webhooks.services import remove_deliveries

USER = "auth.User"
Report = Callable[[str, int, int], object]  # called with step, done and total after each batch
BATCH = 1000
EXPORT_BATCH = 50  # rows that an export reads together: a run has many events
PART_BYTES = 1024 * 1024
# Where the files of a row are, in a folder of its id.
FOLDERS = {"chats.Attachment": files.FOLDER, "runs.ToolInvocation": tool_files.FOLDER}
ERASE_WAIT_SECONDS = 60  # how long an erasure waits for runs and rows that are in use
# How long after the end of a failed or cancelled tool call an erasure waits for files that the call may still store.
ERASE_SETTLE_SECONDS = 10
POLL_SECONDS = 0.1
ERASED = "(erased)"
# What an erasure does to the rows of a table.
DELETED, NO_DATA = "deleted", "no data of users"
# The tables that are kept, and the apps whose tables with a person are kept.
KEPT = {
    USER: "kept, without names",
    "admin.LogEntry": "kept, without names",
    "api.ErasedSubject": "kept, as a keyed digest",
    "credits": "kept, under a pseudonym",
}
# Secrets, which an export leaves out. Who knows the id of a remote task can read and cancel the task.
HIDDEN = {
    USER: {"password"},
    "runs.ToolInvocation": {"remote_task"},
    "apikeys.ApiKey": {"digest"},
    "webhooks.Endpoint": {"secret", "secondary_secret"},
    "api.IdempotencyRecord": {"fingerprint", "claim"},
}


class Table(NamedTuple):
    """What an ``erasure`` does to a table. ``path`` is the lookup from a row to the person; empty for a table without
    persons. In the tables of failed sign-ins, it leads to the username that was typed. If the rows belong to rows of
    another table, that is ``parent``, and ``field`` is the first part of ``path``.
    """

    erasure: str
    path: str = ""
    field: str = ""
    parent: str = ""


def _table(model: type[Model]) -> Table:
    label, app = model._meta.label, model._meta.app_label
    kept = KEPT.get(label) or KEPT.get(app, DELETED)
    if label == USER:
        return Table(kept, "pk")
    # Some rows also belong to a row of the person: the shortest path is the first.
    for field in sorted(model._meta.concrete_fields, key=lambda field: field.name != "user"):
        if field.name == "username":
            return Table(kept, field.name)
        parent: Any = field.related_model
        if parent not in (None, model) and (path := _table(parent).path):
            return Table(kept, f"{field.name}__{path}", field.name, parent._meta.label)
    return Table(KEPT.get(label, NO_DATA))


TABLES = {model._meta.label: _table(model) for model in apps.get_models(include_auto_created=True)}


def rows_of(label: str, user: Any) -> QuerySet[Any]:
    """The person's rows of this table, except what the installation's webhook endpoint got of them."""
    path = TABLES[label].path
    value = user.get_username() if path.endswith("username") else user.pk
    return apps.get_model(label)._base_manager.filter(**{path: value})


def of_installation(user: Any, report: Report | None = None) -> Iterator[QuerySet[Delivery]]:
    """What the installation's endpoint got of the person, in batches: runs may be purged, and bodies have no index."""
    ending = f'"userId":{json.dumps(user.get_username(), ensure_ascii=False)}}}'
    after, seen = "", 0
    installation = Delivery.objects.filter(user=None)
    while batch := list(installation.filter(pk__gt=after).order_by("pk").values_list("pk", "body")[:BATCH]):
        after, seen = batch[-1][0], seen + len(batch)
        if mine := [key for key, body in batch if body.endswith(ending)]:
            yield installation.filter(pk__in=mine)
        if report is not None:
            report("deliveries searched", seen, seen)


def export(user: Any, report: Report | None = None) -> Iterator[str]:
    """Lines ``{"table": …, "row": {…}}``, and for each file ``{"file": …, "offset": …, "base64": …}`` parts. A row is
    followed by the rows that belong to it. Secrets are left out.
    """
    for label, table in TABLES.items():
        if table.path and not table.parent:
            yield from _lines(label, rows_of(label, user), report)
    for rows in of_installation(user, report):
        yield from _lines("webhooks.Delivery", rows)


def _lines(label: str, rows: QuerySet[Any], report: Report | None = None) -> Iterator[str]:
    model, hidden = apps.get_model(label), HIDDEN.get(label, set())
    names = [field.attname for field in model._meta.concrete_fields if field.name not in hidden]
    keys = list(rows.order_by("pk").values_list("pk", flat=True))
    for start in range(0, len(keys), EXPORT_BATCH):
        batch = keys[start : start + EXPORT_BATCH]
        for row in model._base_manager.filter(pk__in=batch).order_by("pk").values(*names):
            for name, value in row.items():
                if isinstance(value, bytes | memoryview):
                    row[name] = bytes(value).decode("utf-8", "replace")
            yield to_text({"table": model._meta.db_table, "row": row})
            for name in files.in_folder(f"{FOLDERS[label]}/{row['id']}") if label in FOLDERS else ():
                yield from _parts(name)
        for child, table in TABLES.items():
            if table.parent == label:
                its_rows = apps.get_model(child)._base_manager.filter(**{f"{table.field}__in": batch})
                # The rows of a chat or a run are not counted in the report.
                yield from _lines(child, its_rows, report if label == USER else None)
        if report is not None:
            report(str(model._meta.verbose_name_plural), start + len(batch), len(keys))


def _parts(name: str) -> Iterator[str]:
    offset = 0
    with files.storage_errors(), default_storage.open(name) as file:
        while part := file.read(PART_BYTES):
            yield json.dumps({"file": name, "offset": offset, "base64": base64.b64encode(part).decode()})
            offset += len(part)


class NotErased(Exception):
    """Something is left. The message says what; a repetition continues."""


def erase(user: Any, reason: str, report: Report, staff: Any = None) -> str:
    """Erase the person, whose credentials are refused from the first step on, and log it as done by ``staff``. Returns
    the pseudonym. Raises NotErased, Unavailable without the storage, and Conflict for a staff account or a reason that
    has the name. What a request that began before still adds is removed too.
    """
    if user.is_staff or user.is_superuser:
        raise Conflict("This is a staff account. Remove its staff status first.")
    if user.get_username().lower() in reason.lower():
        raise Conflict("The reason is stored and must not contain the username.")
    get_user_model()._default_manager.filter(pk=user.pk).update(is_active=False)
    while True:
        _end_runs(user, report)
        _hide_in_log(user)
        _remove_chats(user, report)
        attachments.purge_uploads(user.pk)
        _remove(Delivery.objects.filter(user=user), remove_deliveries)
        for rows in of_installation(user, report):
            _remove(rows, remove_deliveries)
        for label, table in TABLES.items():
            if table.erasure == DELETED and not table.parent.startswith(("chats.", "runs.", "webhooks.")):
                _remove(rows_of(label, user))
        report("other rows removed", 1, 1)
        if pseudonym := _rename(user, reason, staff):
            return pseudonym


def _delete_batch(rows: QuerySet[Any]) -> int:
    """With the rows that refer to them."""
    return rows.filter(pk__in=list(rows.order_by("pk").values_list("pk", flat=True)[:BATCH])).delete()[0]


def _remove(rows: QuerySet[Any], step: Callable[[QuerySet[Any]], int] = _delete_batch) -> None:
    """Repeat ``step`` until no row is left. Another process may have locked some for a moment."""
    end = time.monotonic() + ERASE_WAIT_SECONDS
    while rows.exists():
        if step(rows):
            end = time.monotonic() + ERASE_WAIT_SECONDS
        elif time.monotonic() > end:
            raise NotErased(f"Some rows of {rows.model._meta.db_table} are in use.")
        else:
            time.sleep(POLL_SECONDS)


def _end_runs(user: Any, report: Report) -> None:
    """Delete the chats, which cancels their runs, and wait until all runs have ended and no tool stores a file."""
    chats = list(chats_of(user).order_by("pk"))
    for number, chat in enumerate(chats, 1):
        delete_chat(chat)
        report("chats deleted", number, len(chats))
    end, most = time.monotonic() + ERASE_WAIT_SECONDS, 0
    while left := services.stop_runs_of(user.pk):
        if time.monotonic() > end:
            raise NotErased(f"{len(left)} runs have not ended, the first is {left[0]}. Are run workers up?")
        most = max(most, len(left))
        report("runs ended", most - len(left), most)
        time.sleep(POLL_SECONDS)
    # The thread of a call that was cut off may still be writing a file.
    cut_off = ToolInvocation.objects.filter(
        run__user=user, status__in=[InvocationStatus.FAILED, InvocationStatus.CANCELLED], started_at__isnull=False
    )
    while cut_off.filter(finished_at__gt=clock.now() - timedelta(seconds=ERASE_SETTLE_SECONDS)).exists():
        time.sleep(POLL_SECONDS)


def _remove_chats(user: Any, report: Report) -> None:
    total = Chat.objects.filter(user=user).count()

    def step(chats: QuerySet[Chat]) -> int:
        removed = 0
        for chat_id in list(chats.order_by("pk").values_list("pk", flat=True)):
            removed += purge_chat(chat_id)
            report("chats removed", removed, total)
        return removed

    _remove(Chat.objects.filter(user=user), step)


def _hide_in_log(user: Any) -> None:
    """Remove names from the admin's log entries about the person's rows, while these rows can be found."""
    names = [name for name in (user.get_username(), user.email, user.first_name, user.last_name) if name]
    pattern = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, names))})(?!\w)", re.IGNORECASE)
    for label, table in TABLES.items():
        if not table.path:
            continue
        entries = LogEntry.objects.filter(content_type=ContentType.objects.get_for_model(apps.get_model(label)))
        about = list(entries.order_by().values_list("object_id", flat=True).distinct())
        for start in range(0, len(about), BATCH):
            rows = rows_of(label, user).filter(pk__in=about[start : start + BATCH])
            for entry in entries.filter(object_id__in=[str(key) for key in rows.values_list("pk", flat=True)]):
                entry.object_repr = ERASED
                entry.change_message = pattern.sub(ERASED, entry.change_message)
                entry.save(update_fields=["object_repr", "change_message"])


@transaction.atomic
def _rename(user: Any, reason: str, staff: Any) -> str | None:
    """The last step: until then, a repetition finds the person. None if a request has added rows meanwhile."""
    users = get_user_model()._default_manager
    # FOR UPDATE: until the commit, no row can be added that refers to the user.
    renamed: Any = users.select_for_update().get(pk=user.pk)
    for label, table in TABLES.items():
        if table.erasure == DELETED and rows_of(label, user).exists():
            return None
    digest = ErasedSubject.digest_of(user.get_username())
    ErasedSubject.objects.update_or_create(pk=digest, defaults={"erased_at": clock.now()})
    renamed.username = f"erased-{secrets.token_hex(8)}"
    names = {"username": renamed.username, "email": "", "first_name": "", "last_name": ""}
    users.filter(pk=user.pk).update(**names, password=make_password(None), last_login=None)
    message = f"Erased{'' if staff else ' at the command line'}: {reason}"
    LogEntry.objects.log_actions((staff or user).pk, [renamed], CHANGE, message)
    return renamed.username
