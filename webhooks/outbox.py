"""Records events for endpoints, in the transaction of the change that they report. ``dispatcher.py`` sends them."""

from typing import Any

from django.contrib.auth import get_user_model
from django.db import connection

from config.database.writes import Writes
from config.kernel import clock
from config.kernel.ids import new_id
from config.kernel.jsontext import dumps
from config.queue.publisher import nudge_after_commit
from webhooks.events import AnyEvent, CreditsEvent, TrialEvent
from webhooks.models import Delivery, Endpoint

DELIVER = "webhooks.deliver_due"

# The endpoint's row is only locked against its deletion, so events of many runs of one user are recorded concurrently,
# and the lock order with accounts does not matter. SQL appends the end of the body, because only the installation
# endpoint gets the user's name, and most installations have no such endpoint.
_RECORD = """
    INSERT INTO webhooks_delivery (
        id, event_id, endpoint_id, user_id, event_type, run_id, chat_id, request_id, body,
        status, attempt_count, next_attempt_at, created_at
    )
    SELECT
        CASE WHEN user_id IS NULL THEN %s ELSE %s END, %s, id, user_id, %s, %s, %s, %s,
        CAST(%s AS text)
        || CASE
            WHEN user_id IS NULL THEN ',"userId":' || (SELECT {json}(username) FROM {users} WHERE id = %s) ELSE ''
        END || '}}',
        'PENDING', 0, %s, %s
    FROM webhooks_endpoint
    WHERE (user_id = %s OR user_id IS NULL) AND enabled AND deleted_at IS NULL AND (extended_events OR %s)
"""


def report_credits(user_id: int, event: CreditsEvent, fields: dict[str, Any]) -> None:
    """Record an event of a user's credits for the installation endpoint, if that gets extended events. One query."""
    writes = Writes()
    add(writes, user_id, event, fields)
    writes.do()


def add(writes: Writes, user_id: int, event: AnyEvent, own: dict[str, Any], run: Any = None) -> str:
    """Add the event to ``writes``, for the user's endpoint and the installation endpoint if they are enabled. Returns
    the event's id. ``own`` has the event's own fields (``events.py``); Decimals are written exactly. ``run`` is the run
    that the event is about, if it is an ``Event``.
    """
    now, event_id = clock.now(), new_id("evt")
    of_run = {"runId": run.id, "chatId": run.chat_id} if run else {}
    body = {"id": event_id, "type": event, **of_run, "occurredAt": clock.iso(now), **own}
    moment = connection.ops.adapt_datetimefield_value(now)
    unclosed = dumps(body).decode().removesuffix("}")
    ids = [run.id, run.chat_id, run.request_id] if run else [None, None, ""]
    values: list[Any] = [new_id("dlv"), new_id("dlv"), event_id, event, *ids, unclosed, user_id]
    # Users' endpoints get only the events of runs.
    values += [moment, moment, user_id if run else None, bool(run) and not event.extended]
    json = "to_json" if connection.vendor == "postgresql" else "json_quote"
    record = _RECORD.format(json=json, users=get_user_model()._meta.db_table)
    writes.execute(record, values, then=lambda: nudge_after_commit(DELIVER))
    return event_id


def send_test(endpoint: Endpoint) -> Delivery:
    """Record a test event for only this endpoint, which the caller has locked."""
    now, event_id = clock.now(), new_id("evt")
    body = dumps({"id": event_id, "type": TrialEvent.TEST, "occurredAt": clock.iso(now)}).decode()
    about = {"event_id": event_id, "event_type": TrialEvent.TEST, "body": body}
    nudge_after_commit(DELIVER)
    return Delivery.objects.create(
        endpoint=endpoint, user_id=endpoint.user_id, created_at=now, next_attempt_at=now, **about
    )
