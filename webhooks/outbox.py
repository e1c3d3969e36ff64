"""Recording an event for its user's endpoint, inside the transaction that the event belongs to.

Sending is ``dispatcher.py``'s.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.db import connection

from config.api import clock
from config.api.broker import nudge_after_commit
from config.api.ids import new_id
from config.api.renderers import dumps

DELIVER = "webhooks.deliver_due"

# An event is due from a moment before it is recorded: the process that sends it may know the database's time a round
# trip behind the one that records it, and a nudge that finds nothing due leaves the event to the sweep.
CLOCKS_DIFFER = timedelta(seconds=1)

# One statement, so that events cost a run one round trip. It locks no endpoint against anyone but its removal from
# the table: events of many runs of one user are recorded side by side.
_RECORD = """
    INSERT INTO webhooks_delivery (
        id, event_id, endpoint_id, user_id, event_type, run_id, chat_id, request_id, body,
        status, attempt_count, next_attempt_at, created_at
    )
    SELECT %s, %s, id, user_id, %s, %s, %s, %s, %s, 'PENDING', 0, %s, %s
    FROM webhooks_endpoint WHERE user_id = %s AND enabled AND deleted_at IS NULL
"""


def record(
    user_id: int,
    event_type: str,
    *,
    run_id: str,
    chat_id: str,
    request_id: str = "",
    extra: dict[str, Any] | None = None,
) -> str | None:
    """Write the event for the user's enabled endpoint and return its id, or None if there is no such endpoint.

    ``extra`` are the event's own fields, already in camelCase; Decimals are written digit for digit. The body's bytes
    are fixed here. ``request_id`` is that of the run's cause, for the log lines of the attempts. One query.
    """
    now = clock.now()
    event_id = new_id("evt")
    body = {
        "id": event_id,
        "type": event_type,
        "runId": run_id,
        "chatId": chat_id,
        "occurredAt": clock.iso(now),
        **(extra or {}),
    }
    adapt = connection.ops.adapt_datetimefield_value
    body_text = dumps(body).decode()
    values: list[Any] = [new_id("dlv"), event_id, event_type, run_id, chat_id, request_id, body_text]
    values += [adapt(now - CLOCKS_DIFFER), adapt(now), user_id]
    with connection.cursor() as cursor:
        cursor.execute(_RECORD, values)
        if not cursor.rowcount:
            return None
    nudge_after_commit(DELIVER)
    return event_id
