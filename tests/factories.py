"""One factory for each model, and API clients for both surfaces."""

import hashlib
import secrets
from datetime import timedelta
from typing import Any

import factory
from django.contrib.auth import get_user_model
from django.core.files.base import ContentFile
from django.core.files.storage import default_storage
from django.db import transaction
from django.db.models import F, QuerySet
from factory.django import DjangoModelFactory
from rest_framework.test import APIClient

from config.kernel import clock
from config.kernel.ids import new_id


def force_update(rows: QuerySet[Any], **changes: Any) -> int:
    """Change columns that only transitions may change, so that a test can create any state."""
    return QuerySet.update(rows, **changes)


class UserFactory(DjangoModelFactory):
    class Meta:
        model = get_user_model()

    username = factory.Sequence(lambda n: f"user{n}")
    email = factory.LazyAttribute(lambda user: f"{user.username}@example.com")


def session_client(user: Any) -> APIClient:
    """A client of the session surface, with a real token of the local issuer."""
    from config.api.session_tokens import mint

    client = APIClient()
    client.credentials(HTTP_AUTHORIZATION=f"Bearer {mint(user.get_username())}")
    return client


def public_client(user: Any, scopes: list[str] | None = None) -> APIClient:
    """A client of the public surface, with a real key; ``scopes`` narrows it."""
    from apikeys.keys import create_key

    key, secret = create_key(user, name="test", expiration_days=1)
    if scopes is not None:
        key.scopes = scopes
        key.save(update_fields=["scopes"])
    client = APIClient()
    client.credentials(HTTP_AUTHORIZATION=f"Bearer {secret}")
    return client


def server_client(*scopes: str) -> APIClient:
    """A client with a real server key, which makes session tokens if no ``scopes`` are named."""
    from apikeys.keys import create_server_key

    client = APIClient()
    client.credentials(HTTP_AUTHORIZATION=f"Bearer {create_server_key('test', scopes or ['session-tokens'])[1]}")
    return client


class EndpointFactory(DjangoModelFactory):
    class Meta:
        model = "webhooks.Endpoint"

    user = factory.SubFactory(UserFactory)
    url = "http://127.0.0.1:9/hook"
    secret = factory.LazyFunction(lambda: secrets.token_hex(32))


class ChatFactory(DjangoModelFactory):
    class Meta:
        model = "chats.Chat"

    user = factory.SubFactory(UserFactory)
    title = factory.Sequence(lambda n: f"Chat {n}")


class MessageFactory(DjangoModelFactory):
    class Meta:
        model = "chats.Message"

    chat = factory.SubFactory(ChatFactory)
    run_id = factory.LazyFunction(lambda: new_id("run"))
    role = "user"
    content = "Hello"


class RunFactory(DjangoModelFactory):
    """A completed run. ``due_at`` follows from the status."""

    class Meta:
        model = "runs.Run"

    chat = factory.SubFactory(ChatFactory)
    user = factory.SelfAttribute("chat.user")
    status = "completed"
    user_message_id = factory.LazyFunction(lambda: new_id("msg"))
    due_at = None


class ToolInvocationFactory(DjangoModelFactory):
    class Meta:
        model = "runs.ToolInvocation"

    run = factory.SubFactory(RunFactory)
    turn_index = 1
    call_index = factory.Sequence(lambda n: n + 1)
    tool_call_id = factory.Sequence(lambda n: f"call_{n}")
    name = "calculate"
    node_type = "builtin"
    status = "COMPLETED"

    @classmethod
    def _create(cls, model: Any, *args: Any, **values: Any) -> Any:
        call = super()._create(model, *args, **values)
        type(call.run).objects.filter(pk=call.run_id).update(tool_invocation_count=F("tool_invocation_count") + 1)
        return call


class WaitpointFactory(DjangoModelFactory):
    """A pending waitpoint about an invocation of its run."""

    class Meta:
        model = "runs.Waitpoint"

    run = factory.SubFactory(RunFactory, status="waiting")
    invocation = factory.SubFactory(
        ToolInvocationFactory, run=factory.SelfAttribute("..run"), name="ask_user", status="PENDING"
    )
    kind = "CLARIFICATION"
    request_payload = {"question": "Which colour?"}
    expires_at = factory.LazyFunction(lambda: clock.now() + timedelta(hours=1))


class DeliveryFactory(DjangoModelFactory):
    """A delivered webhook."""

    class Meta:
        model = "webhooks.Delivery"

    endpoint = factory.SubFactory(EndpointFactory)
    user = factory.SelfAttribute("endpoint.user")
    event_id = factory.LazyFunction(lambda: new_id("evt"))
    event_type = "agent.started"
    run_id = factory.LazyFunction(lambda: new_id("run"))
    chat_id = factory.LazyFunction(lambda: new_id("chat"))
    body = "{}"
    status = "DELIVERED"
    next_attempt_at = None
    finished_at = factory.LazyFunction(clock.now)


class AttemptFactory(DjangoModelFactory):
    class Meta:
        model = "webhooks.Attempt"

    delivery = factory.SubFactory(DeliveryFactory)
    number = 1
    started_at = factory.LazyFunction(clock.now)
    duration_ms = 5
    status_code = 200


class AttachmentFactory(DjangoModelFactory):
    """A ready attachment with a file that holds ``content``. With ``status="PENDING"`` it has no file."""

    class Meta:
        model = "chats.Attachment"

    class Params:
        content = b"Hello, file!"

    user = factory.SubFactory(UserFactory)
    file_name = "hello.txt"
    content_type = "text/plain"
    size_bytes = factory.LazyAttribute(lambda attachment: len(attachment.content))
    status = "READY"
    sha256 = factory.LazyAttribute(lambda attachment: hashlib.sha256(attachment.content).hexdigest())
    expires_at = factory.LazyAttribute(
        lambda attachment: clock.now() + timedelta(hours=1) if attachment.status == "PENDING" else None
    )
    stored_name = factory.LazyAttribute(
        lambda attachment: (
            default_storage.save(f"attachments/{new_id('att')}/file", ContentFile(attachment.content))
            if attachment.status == "READY"
            else ""
        )
    )


def charge_turn(user: Any, amount: int, *, run: str, chat: str, index: int) -> Any:
    """Hold exactly ``amount`` for a model turn (1 for 0) and charge it; returns the USAGE row."""
    from credits import ledger
    from credits.models import LedgerEntry

    cause = f"turn:{run}:{index}"
    hold = ledger.hold(user.pk, max(1, amount), cause=cause, run_id=run, chat_id=chat, price={"turn": index})
    assert hold is not None
    ledger.settle(hold, amount, price={"model": "demo", "in": 1, "out": 1})
    return LedgerEntry.objects.get(against=hold, type="USAGE")


def seed_catalogue() -> None:
    """Add the rows of a new installation. A transactional test removes them."""
    from runs import catalogue
    from runs.catalogue.seeds import MODELS, PROVIDERS, add_builtin_tools
    from runs.models import AgentModel, Provider

    if not AgentModel.objects.exists():
        providers = {row["name"]: Provider(**row) for row in PROVIDERS}
        models = [AgentModel(**row | {"provider": providers[row["provider"]]}) for row in MODELS]
        with transaction.atomic():
            Provider.objects.bulk_create(providers.values())
            AgentModel.objects.bulk_create(models)
            add_builtin_tools()
    catalogue.forget()
