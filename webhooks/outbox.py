"""Records an event for its user's endpoint, in the transaction of the change that it reports.

``dispatcher.py`` sends it.
"""

from __future__ import annotations

from typing import Any

from django.db import DEFAULT_DB_ALIAS, connections

from config.database.writes import Writes
from config.kernel import clock
from config.kernel.ids import new_id
from config.kernel.jsontext import dumps
from config.queue.nudges import nudge_after_commit
from webhooks.catalogue import Event

DELIVER = "webhooks.deliver_due"

# The endpoint is locked only against removal of its row, so events of many runs of one user are recorded concurrently,
# and the lock order with the accounts does not matter.
_RECORD = """
    INSERT INTO webhooks_delivery (
        id, event_id, endpoint_id, user_id, event_type, run_id, chat_id, request_id, body,
        status, attempt_count, next_attempt_at, created_at
    )
    SELECT %s, %s, id, user_id, %s, %s, %s, %s, %s, 'PENDING', 0, %s, %s
    FROM webhooks_endpoint WHERE user_id = %s AND enabled AND deleted_at IS NULL
"""


def record(user_id: int, event: Event, **details: Any) -> str | None:
    """``add`` in a statement of its own. Returns the event's id, or None if no endpoint is enabled. One query."""
    writes = Writes()
    event_id = add(writes, user_id, event, **details)
    return event_id if writes.do() else None


def add(
    writes: Writes,
    user_id: int,
    event: Event,
    *,
    run_id: str,
    chat_id: str,
    request_id: str = "",
    extra: dict[str, Any] | None = None,
) -> str:
    """Add the event to ``writes``, for the user's endpoint if it is enabled. Returns the event's id.

    ``extra`` holds the event's own fields (``webhooks.catalogue``); Decimals are written exactly. The body's bytes
    never change afterwards. ``request_id`` is of the request that caused the run, for the log lines of attempts.
    """
    now = clock.now()
    event_id = new_id("evt")
    body = {
        "id": event_id,
        "type": event,
        "runId": run_id,
        "chatId": chat_id,
        "occurredAt": clock.iso(now),
        **(extra or {}),
    }
    moment = connections[DEFAULT_DB_ALIAS].ops.adapt_datetimefield_value(now)
    body_text = dumps(body).decode()
    values: list[Any] = [new_id("dlv"), event_id, event, run_id, chat_id, request_id, body_text]
    values += [moment, moment, user_id]
    writes.execute(_RECORD, values, then=_nudge)
    return event_id


def _nudge() -> None:
    nudge_after_commit(DELIVER)
