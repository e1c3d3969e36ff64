from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from django.db.models import F

from config.database.writes import Writes
from config.kernel.ids import new_id
from config.outbound.loop import shared
from runs.models import Run
from tests import factories
from tests.webhooks.receiver import Behaviour, Receiver, receiving
from webhooks import dispatcher, outbox
from webhooks.events import Event
from webhooks.models import Attempt, Delivery, Endpoint


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture
def endpoint(user, receiver) -> Endpoint:
    """The user's endpoint, at a receiver that answers 200."""
    return factories.EndpointFactory(user=user, url=receiver.url)


@pytest.fixture
def receivers() -> Iterator[Callable[..., Receiver]]:
    """Makes receivers with the given behaviours."""
    made: list[contextmanager] = []

    def make(*behaviours: Behaviour) -> Receiver:
        manager = receiving(*behaviours)
        made.append(manager)
        return manager.__enter__()

    yield make
    for manager in made:
        manager.__exit__(None, None, None)


def emit(user_id: int, event: str, *, run_id: str, chat_id: str, request_id: str = "", extra=()) -> str | None:
    """Record the event in a statement of its own. Returns its id, or None if no endpoint is enabled."""
    writes, run = Writes(), Run(id=run_id, chat_id=chat_id, request_id=request_id)
    event_id = outbox.add(writes, user_id, Event(event), dict(extra), run)
    return event_id if writes.do() else None


def record(user, event_type: str = "agent.started", **extra) -> Delivery:
    """Record an event of a run of ``user``, and return its delivery."""
    event_id = emit(user.pk, event_type, run_id=new_id("run"), chat_id=new_id("chat"), extra=extra)
    return Delivery.objects.get(event_id=event_id)


def deliver(one: dispatcher.Dispatcher | None = None) -> None:
    """Send all due deliveries, and wait for their outcomes, with the database of this thread."""
    one = one or dispatcher.Dispatcher()
    while one.step() or one.in_flight:
        one.awake.wait(None if one.in_flight else 0)
        one.awake.clear()
    one.stop()


def attempt(delivery: Delivery) -> Attempt:
    """Make the attempt without recording its outcome."""
    return shared.submit(dispatcher.attempt(delivery)).result()


def pass_time(seconds: float, **which) -> None:
    """Move the due time of pending deliveries ``seconds`` earlier."""
    Delivery.objects.filter(status="PENDING", **which).update(
        next_attempt_at=F("next_attempt_at") - timedelta(seconds=seconds)
    )
