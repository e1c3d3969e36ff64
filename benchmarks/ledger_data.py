"""The rows of a large ledger, written by COPY, for the reports of ``benchmarks/ledger.py``."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import psycopg

ROWS = 5_000_000
USERS = 2_000
HEAVIEST = 500_000
DAYS = 365
RUNS_A_CHAT = 12
# Without the refund that one in 20 runs has.
ROWS_A_RUN = 13
# Rows of the chat that the heaviest user uses all the time.
LONG_CHAT = 12_000
TOOLS = ("web_fetch", "calculate", "draw_chart", "create_file", "search", "translate", "crawl", "mail")
GRANT = 10**15
COLUMNS = (
    *("id", "account_id", "type", "amount", "tool_key", "chat_id", "run_id", "invocation_id", "against_id"),
    *("cause", "reason", "created_at", "staff_id"),
)
TABLE = "credits_ledgerentry"


def sizes() -> list[int]:
    """The number of rows of each user, in descending order: proportional to 1/rank^s, with a total of ROWS."""
    low, high = 0.0, 3.0
    for _ in range(60):
        s = (low + high) / 2
        if sum(HEAVIEST / rank**s for rank in range(1, USERS + 1)) > ROWS:
            low = s
        else:
            high = s
    found = [max(20, int(HEAVIEST / rank**s)) for rank in range(1, USERS + 1)]
    found[1] += ROWS - sum(found)
    return found


def make_users() -> list[int]:
    """Create ``USERS`` users with a very large balance. Returns their ids, the heaviest user first."""
    from django.contrib.auth import get_user_model

    from credits.models import Account

    model = get_user_model()
    users = model._default_manager.bulk_create([model(username=f"bench{number}") for number in range(USERS)])
    Account.objects.bulk_create([Account(user=user, balance=GRANT) for user in users])
    return [user.pk for user in users]


def count(user_ids: list[int]) -> None:
    from django.db import connection

    from credits import totals

    for begin in range(0, len(user_ids), 50):
        totals.recount(user_ids[begin : begin + 50])
    with connection.cursor() as cursor:
        for kind in totals.kinds():
            cursor.execute(f"VACUUM ANALYZE {kind.table}")


def long_chat(user_id: int) -> str:
    return f"chat_{user_id:06d}{'long':0>20}"


def rows_of_chat(chat_id: str) -> int:
    from credits.models import LedgerEntry

    return LedgerEntry.objects.filter(chat_id=chat_id).count()


def fill(database: psycopg.Connection[tuple[object, ...]], user_ids: list[int]) -> None:
    """Replace the ledger by ``ROWS`` rows of ``user_ids``, ordered by time per user. The first user has most rows.

    Indexes are created at the end and triggers are disabled, because this would otherwise take half an hour. The
    balances of the accounts are set from the rows. ``count`` sets the totals of usage.
    """
    now = datetime.now(UTC)
    with database.transaction():
        database.execute("SET LOCAL session_replication_role = replica")
        database.execute("SET LOCAL maintenance_work_mem = '512MB'")
        indexes = database.execute(
            "SELECT indexname, indexdef FROM pg_indexes WHERE tablename = %s AND indexname NOT IN"
            " (SELECT conname FROM pg_constraint)",
            (TABLE,),
        ).fetchall()
        database.execute(f"TRUNCATE {TABLE} CASCADE")
        for name, _ in indexes:
            database.execute(f"DROP INDEX {name}")
        with database.cursor() as cursor, cursor.copy(f"COPY {TABLE} ({', '.join(COLUMNS)}) FROM STDIN") as copy:
            for number, (user_id, size) in enumerate(zip(user_ids, sizes(), strict=True)):
                for block in _blocks(user_id, size, now, LONG_CHAT / size if number == 0 else 0.0):
                    copy.write(block)
        for _, definition in indexes:
            database.execute(str(definition))
        database.execute(
            """
            UPDATE credits_account SET balance = booked.balance, held = booked.held FROM (
                SELECT account_id,
                       sum(CASE WHEN type IN ('CAPTURE', 'USAGE') THEN -amount
                                WHEN type IN ('GRANT', 'REFUND') THEN amount ELSE 0 END) AS balance,
                       sum(CASE WHEN type = 'HOLD' THEN amount
                                WHEN type IN ('CAPTURE', 'USAGE', 'RELEASE') THEN -amount ELSE 0 END) AS held
                FROM credits_ledgerentry GROUP BY account_id
            ) booked WHERE user_id = booked.account_id
            """
        )
        with (
            database.cursor() as cursor,
            cursor.copy("COPY chats_chat (id, user_id, title, has_line) FROM STDIN") as copy,
        ):
            for chat_id, user_id in _chats(user_ids):
                copy.write_row((chat_id, user_id, f"About {chat_id[-6:]}", False))
    database.execute(f"VACUUM ANALYZE {TABLE}, chats_chat")


def _chats(user_ids: list[int]) -> Iterator[tuple[str, int]]:
    yield long_chat(user_ids[0]), user_ids[0]
    for user_id, size in zip(user_ids, sizes(), strict=True):
        for number in range(-(-_runs(size) // RUNS_A_CHAT)):
            yield f"chat_{user_id:06d}{number:020}", user_id


def _runs(size: int) -> int:
    return max(1, (size - 1) // ROWS_A_RUN)


def _blocks(user_id: int, size: int, now: datetime, share: float) -> Iterator[str]:
    """Text for COPY: a grant, and runs of three turns and three calls. One in 20 runs has a refund.

    A ``share`` of the runs is in the long chat. The others fill one chat after the other.
    """
    luck = random.Random(user_id)
    runs = _runs(size)
    step = timedelta(days=DAYS) / runs
    begin = now - timedelta(days=DAYS)
    lines = [
        f"led_{user_id:06d}grant{0:015d}\t{user_id}\tGRANT\t{GRANT}\t\\N\t\\N\t\\N\t\\N\t\\N\tbench:{user_id}\tbench\t"
        f"{_text(begin - timedelta(hours=1))}\t\\N\n"
    ]
    for run in range(runs):
        at = begin + step * run
        spread = min(step, timedelta(minutes=5)) / 10
        moments = [_text(at + spread * row) for row in range(10)]
        chat = long_chat(user_id) if luck.random() < share else f"chat_{user_id:06d}{run // RUNS_A_CHAT:020}"
        run_id = f"run_{user_id:06d}{run:020d}"
        key = f"{user_id:06d}{run:018d}"
        for turn in range(3):
            asked, answered, ended = moments[turn * 3 : turn * 3 + 3]
            cost = luck.randrange(1, 2_000_000)
            hold, about = f"led_{key}{turn + 11:02d}", f"\\N\t{chat}\t{run_id}\t\\N"
            lines.append(f"{hold}\t{user_id}\tHOLD\t{cost}\t{about}\t\\N\tturn:{run_id}:{turn}\t\t{asked}\t\\N\n")
            lines.append(
                f"led_{key}{turn:02d}\t{user_id}\tUSAGE\t{cost}\t{about}\t{hold}\tusage:{run_id}:{turn}\t\t"
                f"{asked}\t\\N\n"
            )
            invocation, hold = f"inv_{key}{turn:02d}", f"led_{key}{turn + 3:02d}"
            about = f"{TOOLS[int(luck.random() ** 2 * len(TOOLS))]}\t{chat}\t{run_id}\t{invocation}"
            held = luck.randrange(100_000, 12_000_000)
            used = held // 2 if turn == 0 else held
            lines.append(f"{hold}\t{user_id}\tHOLD\t{held}\t{about}\t\\N\thold:{invocation}\t\t{answered}\t\\N\n")
            lines.append(
                f"led_{key}{turn + 6:02d}\t{user_id}\tCAPTURE\t{used}\t{about}\t{hold}\tsettle:{hold}\t\t{ended}\t\\N\n"
            )
            if turn == 0:
                lines.append(
                    f"led_{key}09\t{user_id}\tRELEASE\t{held - used}\t{about}\t{hold}\tsettle:{hold}:rest\t\t"
                    f"{ended}\t\\N\n"
                )
        if run % 20 == 19:
            lines.append(
                f"led_{key}10\t{user_id}\tREFUND\t{used}\t{about}\tled_{key}08\trefund:led_{key}10\tbench\t{moments[9]}\t"
                f"{user_id}\n"
            )
        if len(lines) > 2000:
            yield "".join(lines)
            lines = []
    yield "".join(lines)


def _text(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(sep=" ")
