"""Invariants: what must be true of the database at every moment, after any crash, loss or repetition. Reads only.

Each rule is one statement over whole tables and reports at most MOST rows. So it works with a million runs and beside a
running service: a statement sees one moment, and ``grace`` leaves the sweeps time. Constraints are not checked.
"""
# ruff: noqa: S608  (constants)

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from itertools import islice
from typing import Any

from django.conf import settings
from django.db import connection

from config.kernel import clock
from credits import reconcile
from credits.models import SETTLEMENTS, SPENDING
from runs.lifecycle import line
from runs.models import FINAL_INVOCATION_STATUSES, FINAL_RUN_STATUSES, LIVE_RUN_STATUSES, RunStatus
from webhooks.events import Event

MOST = 20


def _in(values: Iterable[str]) -> str:
    return "IN ('" + "', '".join(values) + "')"


FINAL, LIVE = _in(FINAL_RUN_STATUSES), _in(LIVE_RUN_STATUSES)
CALL_ENDED = _in(FINAL_INVOCATION_STATUSES)
ENDINGS = [event for event in Event if event.stream_status in FINAL_RUN_STATUSES]

ASKED = "EXISTS (SELECT 1 FROM runs_waitpoint WHERE run_id = run.id AND status = 'PENDING')"
OF_RUN = "SELECT 1 FROM runs_toolinvocation WHERE run_id = run.id AND"
PARKED = "runs_run run WHERE parked AND due_at IS NULL AND NOT throttled"
AWAITS = "runs_toolinvocation call WHERE awaiting IS NOT NULL"
# A prune deletes all events of runs that ended at least a day ago, the shortest RUN_EVENT_RETENTION_DAYS; the setting
# may have changed since.
NOT_PRUNED = f"""(
    run.status NOT {FINAL} OR run.finished_at IS NULL OR run.finished_at >= %(a_day_ago)s
    OR EXISTS (SELECT 1 FROM runs_runevent WHERE run_id = run.id)
)"""
OPEN_HOLD = f"""type = 'HOLD' AND NOT EXISTS (
    SELECT 1 FROM credits_ledgerentry settled WHERE settled.against_id = hold.id AND settled.type {_in(SETTLEMENTS)}
)"""


def _sum(of: str, table: str, where: str = "run_id = run.id") -> str:
    return f"(SELECT COALESCE(SUM({of}), 0) FROM {table} WHERE {where})"


def _recorded(of: str) -> str:
    """The sum of this expression over the run's turns and summaries."""
    return f"{_sum(of, 'runs_turn')} + {_sum(of, 'runs_compaction')}"


def _charged(of: str) -> str:
    """The sum of this expression over the charges of the run's complete requests to models."""
    return _sum(of, "credits_ledgerentry", "run_id = run.id AND type = 'USAGE' AND price ->> 'partial' IS NULL")


def _deliveries() -> Iterator[tuple[str, str]]:
    """Each reported change has its delivery; runs from before the endpoint's last change are left out. Deliveries have
    no index by run, so both sides are counted as a whole. One condition for the user's and the installation endpoint
    would compare every run with every endpoint.
    """
    for event in Event:
        status = f'"status":"{event.stream_status}"' if event.stream_status else ""
        whose = ("endpoint.user_id = run.user_id", "endpoint.user_id IS NULL")
        yield (
            f"{event} happened {{}} times, but has {{}} deliveries",
            " UNION ALL ".join(
                f"""
                SELECT run.id, COALESCE(happened.times, 0), COALESCE(sent.times, 0) FROM runs_run run
                JOIN webhooks_endpoint endpoint ON {condition} AND endpoint.enabled AND endpoint.deleted_at IS NULL
                    {"AND endpoint.extended_events" if event.extended else ""}
                LEFT JOIN (
                    SELECT run_id, COUNT(*) AS times FROM runs_runevent
                    WHERE type = '{event.stream_type}' AND data LIKE '%%{status}%%' GROUP BY run_id
                ) happened ON happened.run_id = run.id
                LEFT JOIN (
                    SELECT run_id, endpoint_id, COUNT(*) AS times FROM webhooks_delivery WHERE event_type = '{event}'
                    GROUP BY run_id, endpoint_id
                ) sent ON sent.run_id = run.id AND sent.endpoint_id = endpoint.id
                WHERE run.created_at > endpoint.updated_at + interval '1 second' AND run.created_at > %(kept_since)s
                    AND COALESCE(happened.times, 0) <> COALESCE(sent.times, 0) AND {NOT_PRUNED}
            """
                for condition in whose
            ),
        )


# By step: the text of each violation, and its statement (for PostgreSQL). The first column names the row, the other
# columns fill the text. Without SELECT, the statement reads the column ``id``.
RULES: dict[str, Mapping[str, str]] = {
    "states": {
        "the run has an unknown status": f"runs_run WHERE status NOT {_in(RunStatus.values)}",
        "the run waits, but no waitpoint is open": f"runs_run run WHERE status = 'waiting' AND NOT {ASKED}",
        "a waitpoint is open, but the run does not wait": f"runs_run run WHERE status <> 'waiting' AND {ASKED}",
        "the run waits, but its end was requested": """
            runs_run WHERE status = 'waiting' AND cancel_requested_at IS NOT NULL""",
        "the run has ended, but a tool call of it has not": f"""
            runs_run run WHERE status {FINAL} AND EXISTS ({OF_RUN} status NOT {CALL_ENDED})""",
        "the run has ended, but has no finishedAt": f"runs_run WHERE status {FINAL} AND finished_at IS NULL",
        "the run has a finishedAt, but has not ended": f"runs_run WHERE status NOT {FINAL} AND finished_at IS NOT NULL",
        "a worker owns a run that is not running": "runs_run WHERE status <> 'running' AND worker_id IS NOT NULL",
        "a run waits for room, but is not queued": "runs_run WHERE throttled AND NOT parked AND status <> 'queued'",
        "the run could execute, but no sweep will find it": """
            runs_run WHERE due_at IS NULL AND (status = 'queued' AND NOT blocked AND NOT throttled
                OR status = 'running' AND worker_id IS NULL AND NOT parked)""",
    },
    # Only calls of live runs await outcomes. All open calls of a parked run do, until the run is due.
    "parked": {
        "the run is parked, but no call of it awaits an outcome": f"""
            {PARKED} AND NOT EXISTS ({OF_RUN} awaiting IS NOT NULL)""",
        "the run is parked, but a call of it awaits nobody": f"""
            {PARKED} AND EXISTS ({OF_RUN} awaiting IS NULL AND status NOT {CALL_ENDED})""",
        # ``client`` comes first, as in the alphabet.
        "the run's awaiting is not that of its open calls": """
            runs_run run WHERE COALESCE(awaiting, '') <> COALESCE((
                SELECT MIN(awaiting) FROM runs_toolinvocation WHERE run_id = run.id AND awaiting IS NOT NULL
            ), '')""",
        "the call awaits an outcome, but is not open": f"{AWAITS} AND status <> 'DISPATCHING'",
        "the call awaits an outcome, but has no expiresAt": f"{AWAITS} AND expires_at IS NULL",
        "the call awaits an outcome, but has no open hold": f"""
            {AWAITS} AND credit_estimate > 0 AND NOT EXISTS (
                SELECT 1 FROM credits_ledgerentry hold
                WHERE run_id = call.run_id AND invocation_id = call.id AND {OPEN_HOLD}
            )""",
    },
    "takeovers": {
        "the run's worker is long gone, but no worker took the run over": """
            runs_run run WHERE status = 'running' AND updated_at < %(grace)s AND worker_id IS NOT NULL AND NOT EXISTS (
                SELECT 1 FROM runs_worker WHERE id = run.worker_id AND expires_at >= %(grace)s
            )""",
        "the run lost its worker too often, but was not given up": f"""
            runs_run WHERE status = 'running' AND updated_at < %(grace)s AND worker_id IS NULL
                AND lease_losses >= {line.RUN_LEASE_LOSSES_MAX}""",
    },
    "chats": {
        "the chat's active run is not one of its live runs": f"""
            chats_chat chat WHERE active_run_id IS NOT NULL AND NOT EXISTS (
                SELECT 1 FROM runs_run
                WHERE id = chat.active_run_id AND chat_id = chat.id AND status {LIVE} AND NOT blocked
            )""",
        "the run is live and not in line, but not its chat's active one": f"""
            runs_run run WHERE status {LIVE} AND NOT blocked AND NOT EXISTS (
                SELECT 1 FROM chats_chat WHERE id = run.chat_id AND active_run_id = run.id
            )""",
        "the run is in line behind no live run": f"""
            runs_run run WHERE blocked AND NOT EXISTS (
                SELECT 1 FROM runs_run ahead
                WHERE ahead.chat_id = run.chat_id AND ahead.status {LIVE} AND NOT ahead.blocked
            )""",
    },
    "streams": {
        # Indexes go from 1 to lastStreamIndex without a gap; a constraint keeps them unique.
        "the stream has {} events, but its last index is {}, or there is a gap": f"""
            SELECT run.id, COUNT(event.id), run.last_stream_index
            FROM runs_run run LEFT JOIN runs_runevent event ON event.run_id = run.id
            WHERE {NOT_PRUNED} GROUP BY run.id
            HAVING COUNT(event.id) <> run.last_stream_index OR COALESCE(MIN(event."index"), 1) <> 1
                OR COALESCE(MAX(event."index"), 0) <> run.last_stream_index"""
    },
    # Exactly the last event of a run that has ended is final, and it has the run's status.
    "ends": {
        "an event is final, but the run has not ended with it": f"""
            SELECT run_id FROM runs_runevent event JOIN runs_run run ON run.id = event.run_id
            WHERE event.final AND NOT (run.status {FINAL} AND event."index" = run.last_stream_index)""",
        "the run is {}, but its stream does not end so": f"""
            SELECT id, status FROM runs_run run WHERE status {FINAL} AND NOT EXISTS (
                SELECT 1 FROM runs_runevent WHERE run_id = run.id AND "index" = run.last_stream_index
                    AND type = 'run.status' AND final AND data::json ->> 'status' = run.status
            ) AND {NOT_PRUNED}""",
        "the stream's last status is {}, but the run is not": """
            SELECT run.id, data::json ->> 'status' FROM runs_run run JOIN runs_runevent
                ON run_id = run.id AND "index" = run.last_stream_index AND type = 'run.status'
            WHERE data::json ->> 'status' <> run.status""",
    },
    # Each recorded call has one result event, and no event of the call follows it.
    "calls": {
        "the call was started or completed more than once, or started after its result": """
            SELECT call FROM (
                SELECT data::json ->> 'toolInvocationId' AS call, type, COUNT(*) AS times, MAX("index") AS latest
                FROM runs_runevent WHERE type IN ('tool.started', 'tool.completed') GROUP BY 1, 2
            ) happened GROUP BY call
            HAVING MAX(times) > 1 OR MAX(CASE type WHEN 'tool.started' THEN latest END)
                > MAX(CASE type WHEN 'tool.completed' THEN latest END)""",
        "{} calls have ended, {} have a result event": f"""
            SELECT id, ended, results FROM (
                SELECT run.id,
                    (SELECT COUNT(*) FROM runs_toolinvocation WHERE run_id = run.id AND status {CALL_ENDED}) AS ended,
                    (SELECT COUNT(*) FROM runs_runevent WHERE run_id = run.id AND type = 'tool.completed') AS results
                FROM runs_run run WHERE {NOT_PRUNED}
            ) counted WHERE ended <> results""",
        "the run's toolInvocationCount is not its number of calls": f"""
            runs_run run WHERE tool_invocation_count <> {_sum("1", "runs_toolinvocation")}""",
    },
    # At most one delivery to an endpoint reports the end of a run, with its status, and one the end of a call.
    "outcomes": {
        "more than one webhook event reports the run's end": f"""
            SELECT run_id FROM webhooks_delivery WHERE event_type {_in(ENDINGS)}
            GROUP BY run_id, endpoint_id HAVING COUNT(*) > 1""",
        "more than one webhook event reports the call's end": f"""
            SELECT body::json ->> 'toolInvocationId' FROM webhooks_delivery
            WHERE event_type = '{Event.TOOL_COMPLETED}' GROUP BY 1, endpoint_id HAVING COUNT(*) > 1""",
    }
    | {
        f"a webhook says {event}, but the run is not": f"""
            runs_run WHERE status <> '{event.stream_status}'
                AND id IN (SELECT run_id FROM webhooks_delivery WHERE event_type = '{event}')"""
        for event in ENDINGS
    },
    # Charges agree with the work done. ``reconcile`` compares accounts with the ledger.
    "charges": {
        "the hold is open, but its run has ended": f"""
            credits_ledgerentry hold
            WHERE {OPEN_HOLD} AND EXISTS (SELECT 1 FROM runs_run WHERE id = hold.run_id AND status {FINAL})""",
        "the call was charged more than once": """
            SELECT invocation_id FROM credits_ledgerentry WHERE type = 'CAPTURE'
            GROUP BY invocation_id HAVING COUNT(*) > 1""",
        # The condition on the run is for the ledger's index.
        "the call's creditUsed is not what it was charged": """
            runs_toolinvocation call WHERE CASE status WHEN 'COMPLETED' THEN credit_used ELSE 0 END <> (
                SELECT COALESCE(SUM(amount), 0) FROM credits_ledgerentry
                WHERE run_id = call.run_id AND invocation_id = call.id AND type = 'CAPTURE'
            )""",
        "the run's turns are not what it was charged for": f"""
            runs_run run WHERE {_recorded("cost")} <> {_charged("amount")}
                OR {_recorded("CASE WHEN held > 0 THEN 1 END")} <> {_charged("1")}""",
        # Turns that ended early are part of the usage, but have no rows of their own.
        "the run's usage is less than that of its turns": f"""
            runs_run run WHERE {_recorded("input_tokens")} > input_tokens OR {_sum("1", "runs_turn")} > turn_count""",
        "the run spent more than its maxCredits": f"""
            runs_run run WHERE max_credits IS NOT NULL AND max_credits < (
                SELECT SUM(CASE type WHEN 'REFUND' THEN -amount ELSE amount END) FROM credits_ledgerentry
                WHERE run_id = run.id AND type {_in(SPENDING)}
            )""",
        "the available credits are below zero without an adjustment by staff": """
            SELECT user_id FROM credits_account account WHERE balance < held AND NOT EXISTS (
                SELECT 1 FROM credits_ledgerentry
                WHERE account_id = account.user_id AND type = 'ADJUSTMENT' AND amount < 0
            )""",
    },
    "deliveries": dict(_deliveries()),
}
SQLITE = {  # What SQLite spells differently.
    "::json": "",
    "endpoint.updated_at + interval '1 second'": (
        "strftime('%%Y-%%m-%%d %%H:%%M:%%f', endpoint.updated_at, '+1 second')"
    ),
}


def violations(report: Callable[[str, int, int], object] = lambda *step: None, *, workers: bool = True) -> list[str]:
    """One line for each violation, at most MOST for each step. ``report`` gets the progress (step, its number, total),
    because large tables take minutes. Without ``workers``, as for a restored backup, takeovers are not checked.
    """
    steps = {name: _each(rules) for name, rules in RULES.items() if workers or name != "takeovers"}
    steps["accounts"] = reconcile.drift()
    found: list[str] = []
    for number, (name, step) in enumerate(steps.items(), 1):
        report(name, number, len(steps))
        lines = list(islice(step, MOST + 1))
        found += lines[:MOST]
        if len(lines) > MOST:
            found.append(f"… and more of this kind: {lines[MOST]}")
    return found


def _each(rules: Mapping[str, str]) -> Iterator[str]:
    """A line for each row that breaks a rule."""
    # The sweeps should have handled workers and runs that are older than this.
    grace = timedelta(seconds=5 * (settings.RUN_LEASE_SECONDS + settings.RUN_SWEEP_SECONDS))
    ago = {"grace": grace, "a_day_ago": timedelta(days=1), "kept_since": timedelta(settings.WEBHOOK_RETENTION_DAYS)}
    adapt = connection.ops.adapt_datetimefield_value
    values: dict[str, Any] = {name: adapt(clock.now() - time) for name, time in ago.items()}
    for text, statement in rules.items():
        statement = statement.strip()
        if not statement.startswith("SELECT"):
            statement = f"SELECT id FROM {statement}"
        for of_postgresql, of_sqlite in SQLITE.items() if connection.vendor == "sqlite" else ():
            statement = statement.replace(of_postgresql, of_sqlite)
        with connection.cursor() as cursor:
            cursor.execute(f"{statement} LIMIT {MOST + 1}", values)
            for key, *columns in cursor.fetchall():
                yield f"{key}: {text.format(*columns)}"
