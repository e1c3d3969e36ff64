"""``erase``: removes all content, files, events and names of a person at once. The ledger stays, under a pseudonym.

Each step can be interrupted and repeated. The name is removed last, so that a repetition finds the person.
"""

import re
import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.auth import get_user_model
from django.contrib.auth.hashers import make_password
from django.contrib.contenttypes.models import ContentType
from django.db import transaction
from django.db.models import QuerySet

from chats import purge
from chats.models import Chat
from chats.services import chats_of, delete_chat
from config.api.models import ErasedSubject
from config.database import batches
from config.kernel import clock
from config.kernel.errors import Conflict
from runs import services
from runs.models import InvocationStatus, Run, ToolInvocation
from runs.privacy import tables
from runs.privacy.tables import TABLES, Erasure, Report
from webhooks.models import Delivery
from webhooks.services import remove_deliveries

# How long `erase_user` waits for runs and rows that are in use.
ERASE_WAIT_SECONDS = 60
# How long after the end of a failed or cancelled tool call `erase_user` waits for the call's files.
ERASE_SETTLE_SECONDS = 10

POLL_SECONDS = 0.1
ERASED = "(erased)"
BATCH = 1000


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
        purge.purge_uploads(user.pk)
        _remove_deliveries(user, report)
        for label, table in TABLES.items():
            _, parent = tables.reference(label)
            if table.erasure == Erasure.DELETED and not parent.startswith(("chats.", "runs.", "webhooks.")):
                _remove(tables.rows_of(label, user))
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
    settle = timedelta(seconds=ERASE_SETTLE_SECONDS)
    while cut_off.filter(finished_at__gt=clock.now() - settle).exists():
        time.sleep(POLL_SECONDS)


def _remove_chats(user: Any, report: Report) -> None:
    total = Chat.objects.filter(user=user).count()

    def step(chats: QuerySet[Chat]) -> int:
        removed = 0
        for chat_id in list(chats.order_by("pk").values_list("pk", flat=True)):
            # By its run, the delivery to the installation endpoint is found. Afterwards the run is gone.
            deliveries = Delivery.objects.filter(run_id__in=Run.objects.filter(chat=chat_id).values("pk"))
            batches.in_batches(lambda rows=deliveries: remove_deliveries(rows))  # type: ignore[misc]
            removed += purge.purge_chat(chat_id)
            report("chats removed", removed, total)
        return removed

    _remove(Chat.objects.filter(user=user), step)


def _remove_deliveries(user: Any, report: Report) -> None:
    _remove(Delivery.objects.filter(user=user), remove_deliveries)
    for rows in tables.of_installation(user, report):
        _remove(rows, remove_deliveries)


def _hide_in_log(user: Any) -> None:
    """Remove names from the admin's log entries about the person's rows, while these rows can be found."""
    names = [name for name in (user.get_username(), user.email, user.first_name, user.last_name) if name]
    pattern = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, names))})(?!\w)", re.IGNORECASE)
    for label, table in TABLES.items():
        if table.erasure in tables.WITHOUT_ROWS:
            continue
        model = tables.model_of(label)
        entries = LogEntry.objects.filter(content_type=ContentType.objects.get_for_model(model))
        about = list(entries.order_by().values_list("object_id", flat=True).distinct())
        for start in range(0, len(about), BATCH):
            rows = tables.rows_of(label, user).filter(pk__in=about[start : start + BATCH])
            for entry in entries.filter(object_id__in=[str(key) for key in rows.values_list("pk", flat=True)]):
                entry.object_repr = ERASED
                entry.change_message = pattern.sub(ERASED, entry.change_message)
                entry.save(update_fields=["object_repr", "change_message"])


@transaction.atomic
def _rename(user: Any, reason: str, staff: Any) -> str | None:
    """The last step. None if a request has added rows meanwhile."""
    users = get_user_model()._default_manager
    # FOR UPDATE: until the commit, no row can be added that refers to the user.
    users.select_for_update().get(pk=user.pk)
    for label, table in TABLES.items():
        if table.erasure == Erasure.DELETED and tables.rows_of(label, user).exists():
            return None
    digest = ErasedSubject.digest_of(user.get_username())
    ErasedSubject.objects.update_or_create(pk=digest, defaults={"erased_at": clock.now()})
    pseudonym = f"erased-{secrets.token_hex(8)}"
    names = {"username": pseudonym, "email": "", "first_name": "", "last_name": ""}
    users.filter(pk=user.pk).update(**names, password=make_password(None), last_login=None)
    LogEntry.objects.create(
        user_id=(staff or user).pk,
        content_type=ContentType.objects.get_for_model(get_user_model()),
        object_id=str(user.pk),
        object_repr=pseudonym,
        action_flag=CHANGE,
        change_message=f"Erased{'' if staff else ' at the command line'}: {reason}",
    )
    return pseudonym
