"""Creates a user with rows of every kind, for tests that call every operation of the API."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from apikeys.keys import create_key
from chats.models import Chat
from config.kernel import clock
from config.kernel.ids import new_id
from credits import ledger
from credits.models import LedgerEntry
from tests import factories
from tests.credits.helpers import spend, turn

# Path parameter → prefix of its ids.
PREFIXES = {
    "chatId": "chat",
    "runId": "run",
    "waitpointId": "wp",
    "toolInvocationId": "inv",
    "keyId": "key",
    "attachmentId": "att",
    "messageId": "msg",
    "ledgerId": "led",
}


# A message of a client of the AI SDK.
CHAT_REQUEST: dict[str, Any] = {
    "id": "my-chat",
    "messages": [{"id": "u1", "role": "user", "parts": [{"type": "text", "text": "Hello"}]}],
}
# And of AG-UI.
AG_UI_REQUEST: dict[str, Any] = {
    "threadId": "my-chat",
    "runId": "r1",
    "messages": [{"id": "u1", "role": "user", "content": "Hello"}],
}


@dataclass
class World:
    """``ids``: an object of the user for each path parameter. ``secrets``: texts that only the user may see."""

    user: Any
    ids: dict[str, str]
    secrets: list[str]


def build(user: Any, rows: int = 1) -> World:
    """Create ``rows`` of each kind: chats, messages and runs of a chat, calls of a run, keys, deliveries, ledger."""
    ledger.account_for(user.pk)
    chats = [factories.ChatFactory(user=user) for _ in range(rows)]
    chat, secrets = chats[0], [chat.pk for chat in chats]
    for _ in range(rows):
        run = factories.RunFactory(chat=chat)
        message = factories.MessageFactory(chat=chat, run_id=run.pk)
        secrets += [run.pk, message.pk, factories.AttachmentFactory(user=user, message=message).pk]
        factories.ToolInvocationFactory(run=run)
        turn(user, 1000, run=run.pk, chat=chat.pk, index=1)
    waiting = factories.RunFactory(chat=chat, status="waiting")
    Chat.objects.filter(pk=chat.pk).update(active_run_id=waiting.pk)
    for index, each in enumerate(chats):
        spend(user, 1000, run=waiting.pk, chat=each.pk, tool=f"tool_{index}")
        factories.ToolInvocationFactory(run=waiting)
    waitpoint = factories.WaitpointFactory(run=waiting)
    columns = {"name": "show_map", "node_type": "client", "status": "DISPATCHING", "awaiting": "client"}
    call = factories.ToolInvocationFactory(run=waiting, expires_at=clock.now() + timedelta(hours=1), **columns)
    factories.force_update(type(waiting).objects.filter(pk=waiting.pk), awaiting="client")
    keys = [create_key(user, name=f"key {index}")[0] for index in range(rows)]
    endpoint = factories.EndpointFactory(user=user)
    for _ in range(rows):
        delivery = factories.AttemptFactory(delivery__endpoint=endpoint).delivery
        factories.AttemptFactory(delivery=delivery, number=2)
        secrets.append(delivery.pk)
    attachment = factories.AttachmentFactory(user=user)
    secrets += [attachment.pk, call.pk, waiting.pk, waitpoint.pk, endpoint.pk, *(key.pk for key in keys)]
    ids = {"chatId": chat.pk, "chatKey": chat.pk, "runId": waiting.pk, "waitpointId": waitpoint.pk, "keyId": keys[0].pk}
    ids |= {
        "toolInvocationId": call.pk,
        "attachmentId": attachment.pk,
        "messageId": message.pk,
        "userId": user.get_username(),
    }
    ids |= {"ledgerId": LedgerEntry.objects.filter(account_id=user.pk, type="GRANT").earliest("created_at").pk}
    return World(user, ids, secrets)


def unknown_ids() -> dict[str, str]:
    """Return well-formed ids of objects that do not exist."""
    return {name: new_id(prefix) for name, prefix in PREFIXES.items()}
