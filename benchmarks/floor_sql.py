"""A run as three transactions of plain SQL: the least that durability, order and money can cost.

The schema has what a run must leave behind, and seven indexes: a run, two messages, five events, a ledger row and a
balance. There is no lease, no limit, no webhook and no check of anything.
"""

import itertools
import secrets

import psycopg

Connection = psycopg.Connection[tuple[int, ...]]
# No index has a column that changes. Pages keep space for the new versions of rows that change, as HOT updates need.
SCHEMA = """
    CREATE TABLE account (user_id int PRIMARY KEY, balance bigint NOT NULL) WITH (fillfactor = 50);
    CREATE TABLE run (
        id text PRIMARY KEY, user_id int NOT NULL, chat_id text NOT NULL, status text NOT NULL,
        created_at timestamptz NOT NULL, started_at timestamptz, finished_at timestamptz
    ) WITH (fillfactor = 70);
    CREATE INDEX run_of_user ON run (user_id, created_at);
    CREATE TABLE message (
        id text PRIMARY KEY, chat_id text NOT NULL, role text NOT NULL, content text NOT NULL,
        created_at timestamptz NOT NULL
    );
    CREATE INDEX message_of_chat ON message (chat_id, created_at);
    CREATE TABLE event (run_id text, number int, kind text NOT NULL, data jsonb NOT NULL, PRIMARY KEY (run_id, number));
    CREATE TABLE ledger (id text PRIMARY KEY, user_id int NOT NULL, run_id text NOT NULL, amount bigint NOT NULL);
"""
USERS = 20
EVENT = "INSERT INTO event (run_id, number, kind, data) VALUES (%s, %s, %s, %s)"
MESSAGE = "INSERT INTO message (id, chat_id, role, content, created_at) VALUES (%s, %s, %s, %s, now())"
_numbers = itertools.count()


def make_schema(connection: Connection) -> None:
    connection.execute(SCHEMA)
    for user in range(USERS):
        connection.execute("INSERT INTO account VALUES (%s, 1000000000)", [user])
    connection.commit()


def one_run(connection: Connection) -> None:
    user, name = next(_numbers) % USERS, secrets.token_hex(10)
    run, chat = f"run_{name}", f"chat_{name}"
    # Started by a request.
    connection.execute(
        "INSERT INTO run (id, user_id, chat_id, status, created_at) VALUES (%s, %s, %s, 'queued', now())",
        [run, user, chat],
    )
    connection.execute(MESSAGE, [f"msg_a{name}", chat, "user", "/say A constant."])
    connection.execute(EVENT, [run, 1, "run.created", "{}"])
    connection.commit()
    # Claimed by a worker.
    connection.execute(
        "UPDATE run SET status = 'running', started_at = now() WHERE id = %s AND status = 'queued'", [run]
    )
    connection.execute(EVENT, [run, 2, "run.started", "{}"])
    connection.commit()
    # Completed, and paid for.
    connection.execute(
        "UPDATE run SET status = 'completed', finished_at = now() WHERE id = %s AND status = 'running'", [run]
    )
    connection.execute(MESSAGE, [f"msg_b{name}", chat, "assistant", "A constant."])
    connection.execute(
        f"{EVENT}, (%s, %s, %s, %s), (%s, %s, %s, %s)",
        [
            *(run, 3, "message.delta", '{"text": "A constant."}'),
            *(run, 4, "message.completed", '{"text": "A constant."}'),
            *(run, 5, "run.completed", "{}"),
        ],
    )
    connection.execute("INSERT INTO ledger VALUES (%s, %s, %s, -1000)", [f"led_{name}", user, run])
    connection.execute("UPDATE account SET balance = balance - 1000 WHERE user_id = %s AND balance >= 1000", [user])
    connection.commit()
