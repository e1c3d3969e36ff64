"""Operations on chats and messages. Runs build on this module; here a run is a plain id."""

import logging
import re
from collections.abc import Collection
from datetime import datetime
from typing import Any

from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models import Prefetch, QuerySet
from django.dispatch import Signal

from chats import attachments
from chats.models import CLIENT_ID_MAX_CHARS, Attachment, Chat, Message
from config.database import batches
from config.database.writes import Writes
from config.kernel import clock
from config.kernel.errors import Conflict, NotFound, Unavailable
from config.queue import jobs

logger = logging.getLogger(__name__)

# Printable ASCII.
CLIENT_ID = re.compile(rf"[ -~]{{1,{CLIENT_ID_MAX_CHARS}}}")
TITLE_FROM_MESSAGE_CHARS = 80
# Above this number of chats, reading all chats of the user is faster than looking up each.
TITLES_BY_ID_MOST = 200
CHATS_BATCH = 100

# Sent in the transaction that deletes the chat, so receivers change their rows with it. Argument: chat_id.
chat_deleted = Signal()
# Sent outside a transaction: receivers delete their rows of the chat. Argument: chat_id. A receiver returns whether
# rows are left, and may raise Unavailable.
chat_purged = Signal()


def chats_of(user: Any) -> QuerySet[Chat]:
    """The user's chats that are not deleted."""
    return Chat.objects.filter(user=user, deleted_at=None)


def messages_of(user: Any) -> QuerySet[Message]:
    """The messages of the user's chats that are not deleted, with their attachments in order."""
    in_order = Prefetch("attachments", Attachment.objects.order_by("position"))
    return Message.objects.filter(chat__user=user, chat__deleted_at=None).prefetch_related(in_order)


def make_chat(user: Any, title: str | None = None, client_id: str | None = None) -> tuple[Chat, bool]:
    """A new chat and True, or the user's live chat with this ``client_id`` and False. Concurrent calls create one."""
    now = clock.now()
    created = {"title": title, "created_at": now, "updated_at": now}
    if client_id is None:
        return Chat.objects.create(user=user, **created), True
    try:
        return chats_of(user).get_or_create(user=user, client_id=client_id, deleted_at=None, defaults=created)
    except IntegrityError:
        raise Conflict("The chat was deleted meanwhile; try again.") from None


def find_chat(user: Any, key: str) -> Chat | None:
    """The user's live chat with this id, or else with this client id."""
    if not CLIENT_ID.fullmatch(key):
        return None
    by_id = chats_of(user).filter(pk=key).first() if key.startswith("chat_") else None
    return by_id or chats_of(user).filter(client_id=key).first()


def rename_chat(chat: Chat, title: str | None) -> Chat:
    chat.title, chat.updated_at = title, clock.after(chat.updated_at)
    if not Chat.objects.filter(pk=chat.pk, deleted_at=None).update(title=chat.title, updated_at=chat.updated_at):
        raise NotFound
    return chat


@transaction.atomic
def delete_chat(chat: Chat) -> None:
    """Hide the chat and everything in it at once. A second call changes nothing."""
    if locking(chat.user_id, chat.pk).first() is None:
        return
    now = clock.now()
    Chat.objects.filter(pk=chat.pk).update(deleted_at=now, updated_at=now)
    chat_deleted.send(Chat, chat_id=chat.pk)


def locking(user_id: int, chat_id: str) -> QuerySet[Chat]:
    """The user's live chat, locked until the transaction ends. It is the first lock in the order chat, run, account."""
    # No key lock, so concurrent inserts of messages and runs, which refer to the chat, do not wait.
    return chats_of(user_id).select_for_update(no_key=True).filter(pk=chat_id)


def title_from(text: str) -> str | None:
    """A title for a chat without one: the first line of its first message."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    if len(line) > TITLE_FROM_MESSAGE_CHARS:
        line = line[: TITLE_FROM_MESSAGE_CHARS - 1].rstrip() + "…"
    return line or None


def add_message(writes: Writes, chat_id: str, run_id: str, role: str, at: datetime, **about: Any) -> Message:
    """``about``: ``content`` or ``replaced``, if they are not empty."""
    message = Message(chat_id=chat_id, run_id=run_id, role=role, created_at=at, updated_at=at, **about)
    writes.insert(message)
    return message


def write_content(writes: Writes, message_id: str, content: str) -> None:
    writes.update(Message, {"id": message_id}, {"content": content, "updated_at": clock.now()})


def titles_of(user_id: int, chat_ids: Collection[str]) -> dict[str, str | None]:
    """The titles by id of the user's chats ``chat_ids``, also of deleted ones; possibly of more chats."""
    chats = Chat.objects.filter(user_id=user_id).order_by()
    if len(chat_ids) <= TITLES_BY_ID_MOST:
        chats = chats.filter(pk__in=list(chat_ids))
    return dict(chats.values_list("pk", "title"))


def purge_chats() -> int:
    """Purge the chats that were deleted more than CHAT_RETENTION_DAYS ago. Returns their number."""
    due = Chat.objects.filter(deleted_at__lt=attachments.cutoff(settings.CHAT_RETENTION_DAYS))
    return sum(jobs.each("purge-chats", batches.in_order(due, "deleted_at", CHATS_BATCH), purge_chat))


def purge_chat(chat_id: str) -> bool:
    """Remove a chat that its user has deleted, with its content. Ledger rows stay. Returns False if a part is left for
    the next purge. Several processes may do this at the same time, and each may be interrupted.
    """
    attached = Attachment.objects.filter(message__chat=chat_id).order_by("pk")
    try:
        while not batches.stopping.is_set() and attached.exists():
            attachments.delete_with_files(attached)
        answers = [left for _, left in chat_purged.send(Chat, chat_id=chat_id)]
    except Unavailable:
        logger.warning("chat %s is not purged yet: its files were not removed", chat_id)
        return False
    messages = Message.objects.filter(chat=chat_id)
    batches.in_batches(lambda: batches.delete_batch(messages))
    if any(answers) or messages.exists():
        return False
    return bool(batches.delete_batch(Chat.objects.filter(pk=chat_id)))
