"""Fixtures of the admin tests: members of staff with roles, and a run with rows in every related table."""

import json
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import Group, Permission
from django.core.cache import cache
from django.test import Client

from config.kernel import clock
from config.kernel.ids import new_id
from credits import ledger
from runs.catalogue import seeds
from runs.models import Run, RunEvent, Turn
from tests import factories

# Only the content page may show this text.
CONTENT = "canary-of-a-message"
SECRET = "canary-of-a-secret"


@pytest.fixture(autouse=True)
def fresh(db):
    """Create the roles again, as a test may have emptied every table, and clear the cached metrics."""
    seeds.install_roles(Group, Permission)
    cache.clear()


@pytest.fixture
def sign_in():
    """Return a function that signs in a new member of staff with roles, permissions or as a superuser.

    A permission is written ``app.codename``.
    """

    def make(*roles: str, permissions: tuple[str, ...] = (), superuser: bool = False) -> Client:
        person: Any = factories.UserFactory(is_staff=True, is_superuser=superuser)
        person.groups.set(Group.objects.filter(name__in=roles))
        for label in permissions:
            app, _, codename = label.partition(".")
            person.user_permissions.add(Permission.objects.get(content_type__app_label=app, codename=codename))
        client = Client()
        client.force_login(person)
        client.person = person
        return client

    return make


@pytest.fixture
def boss(sign_in) -> Client:
    return sign_in(superuser=True)


def make_run(user: Any, *, turns: int = 1, **fields: Any) -> Run:
    """Create a run. Each turn has a tool call, charges, events and deliveries. Every text is CONTENT."""
    now = clock.now()
    chat = factories.ChatFactory(user=user, title=CONTENT)
    values = {"status": "completed", "started_at": now, "finished_at": now + timedelta(seconds=3), **fields}
    run = factories.RunFactory(chat=chat, created_at=now - timedelta(seconds=2), resolved_model="demo", **values)
    message = factories.MessageFactory(chat=chat, run_id=run.pk, content=CONTENT)
    Run.objects.filter(pk=run.pk).update(user_message_id=message.pk)
    endpoint = user.webhook_endpoints.first() or factories.EndpointFactory(user=user, secret=SECRET * 3)
    for number, status in enumerate(("queued", "running", run.status), 1):
        add_event(run, number, "run.status", status=status)
    for turn in range(1, turns + 1):
        add_event(run, turn + 3, "message.delta", text=CONTENT)
        Turn.objects.create(
            run=run, index=turn, model="demo", text=CONTENT, input_tokens=1200, output_tokens=34, cost=500_000,
            started_at=now, finished_at=now + timedelta(milliseconds=300),
        )  # fmt: skip
        factories.charge_turn(user, 500_000, run=run.pk, chat=chat.pk, index=turn)
        call = factories.ToolInvocationFactory(
            run=run, turn_index=turn, call_index=1, input={"text": CONTENT}, result=CONTENT, error_message=CONTENT,
            started_at=now, finished_at=now + timedelta(milliseconds=1500),
        )  # fmt: skip
        factories.WaitpointFactory(
            run=run, invocation=call, status="COMPLETED", request_payload={"question": CONTENT},
            resolved_payload={"answer": CONTENT}, resolved_at=now,
        )  # fmt: skip
        ledger.hold(
            user.pk, 2_000_000, invocation_id=call.pk, tool_key="calculate", chat_id=chat.pk, run_id=run.pk, price={}
        )
        ledger.capture(call.pk, 1_250_000)
        delivery = factories.DeliveryFactory(
            endpoint=endpoint, run_id=run.pk, chat_id=chat.pk, event_type="tool.completed", attempt_count=2,
            body=json.dumps({"toolInvocationId": call.pk}),
        )  # fmt: skip
        factories.AttemptFactory(delivery=delivery, number=1, status_code=503, duration_ms=71)
        factories.AttemptFactory(delivery=delivery, number=2)
    return Run.objects.get(pk=run.pk)


def add_event(run: Run, index: int, kind: str, **data: Any) -> None:
    RunEvent.objects.create(run=run, index=index, type=kind, data=json.dumps(data))


def unknown(prefix: str) -> str:
    return new_id(prefix)
