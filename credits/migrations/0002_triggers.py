"""Triggers of the ledger: its rows never change, and each new row is added to the totals that the usage reports read.

- UPDATE and DELETE are refused, and TRUNCATE on PostgreSQL. A test database is emptied between tests, by TRUNCATE on
  PostgreSQL and by DELETE on SQLite: both are allowed where the database's name says that it is a test database.
- The totals are kept by triggers because a total must not depend on the code that writes a row. The rows of an account
  are written one after the other (each write changes the account first), so no two writers wait for a total.

SQLite drops a table's triggers when a migration alters the table: such a migration must run ``seal`` and
``start_counting`` again.
"""

from django.db import migrations

SEAL_POSTGRESQL = [
    """
    CREATE OR REPLACE FUNCTION credits_ledger_is_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF TG_OP = 'TRUNCATE' AND current_database() LIKE 'test\\_%' THEN
            RETURN NULL;
        END IF;
        RAISE EXCEPTION 'the ledger is append-only: % refused', TG_OP USING ERRCODE = 'integrity_constraint_violation';
    END
    $$
    """,
    """
    CREATE OR REPLACE TRIGGER credits_ledger_rows BEFORE UPDATE OR DELETE ON credits_ledgerentry
    FOR EACH ROW EXECUTE FUNCTION credits_ledger_is_append_only()
    """,
    """
    CREATE OR REPLACE TRIGGER credits_ledger_table BEFORE TRUNCATE ON credits_ledgerentry
    FOR EACH STATEMENT EXECUTE FUNCTION credits_ledger_is_append_only()
    """,
]
SEAL_SQLITE = [
    """
    CREATE TRIGGER IF NOT EXISTS credits_ledger_update BEFORE UPDATE ON credits_ledgerentry
    BEGIN SELECT RAISE(ABORT, 'the ledger is append-only: UPDATE refused'); END
    """,
    """
    CREATE TRIGGER IF NOT EXISTS credits_ledger_delete BEFORE DELETE ON credits_ledgerentry
    WHEN NOT EXISTS (
        SELECT 1 FROM pragma_database_list
        WHERE name = 'main' AND (file = '' OR file LIKE '%/test.sqlite3%')
    )
    BEGIN SELECT RAISE(ABORT, 'the ledger is append-only: DELETE refused'); END
    """,
]
UNSEAL = {
    "postgresql": [
        "DROP TRIGGER IF EXISTS credits_ledger_rows ON credits_ledgerentry",
        "DROP TRIGGER IF EXISTS credits_ledger_table ON credits_ledgerentry",
        "DROP FUNCTION IF EXISTS credits_ledger_is_append_only()",
    ],
    "sqlite": ["DROP TRIGGER IF EXISTS credits_ledger_update", "DROP TRIGGER IF EXISTS credits_ledger_delete"],
}


def seal(apps, schema_editor):
    for statement in {"postgresql": SEAL_POSTGRESQL, "sqlite": SEAL_SQLITE}[schema_editor.connection.vendor]:
        schema_editor.execute(statement, params=None)


def unseal(apps, schema_editor):
    for statement in UNSEAL[schema_editor.connection.vendor]:
        schema_editor.execute(statement, params=None)


COUNT_POSTGRESQL = """
    CREATE OR REPLACE FUNCTION credits_count_usage() RETURNS trigger LANGUAGE plpgsql AS $$
    DECLARE
        net bigint := CASE NEW.type WHEN 'REFUND' THEN -NEW.amount ELSE NEW.amount END;
        today date := (NEW.created_at AT TIME ZONE 'UTC')::date;
    BEGIN
        IF NEW.type <> 'REFUND' THEN
            INSERT INTO credits_daytotal AS kept (account_id, day, tool_key, amount, records, latest)
            VALUES (NEW.account_id, today, COALESCE(NEW.tool_key, ''), NEW.amount, 1, NEW.created_at)
            ON CONFLICT (account_id, day, tool_key) DO UPDATE SET amount = kept.amount + excluded.amount,
                records = kept.records + 1, latest = GREATEST(kept.latest, excluded.latest);
        END IF;
        IF NEW.chat_id IS NOT NULL THEN
            INSERT INTO credits_chattotal AS kept (account_id, chat_id, amount, records, latest)
            VALUES (NEW.account_id, NEW.chat_id, net, 1, NEW.created_at)
            ON CONFLICT (account_id, chat_id) DO UPDATE SET amount = kept.amount + excluded.amount,
                records = kept.records + 1, latest = GREATEST(kept.latest, excluded.latest);
            INSERT INTO credits_chatdaytotal AS kept (account_id, day, chat_id, amount, records, latest)
            VALUES (NEW.account_id, today, NEW.chat_id, net, 1, NEW.created_at)
            ON CONFLICT (account_id, day, chat_id) DO UPDATE SET amount = kept.amount + excluded.amount,
                records = kept.records + 1, latest = GREATEST(kept.latest, excluded.latest);
            IF NEW.run_id IS NOT NULL THEN
                INSERT INTO credits_runtotal AS kept (account_id, chat_id, run_id, tool_key, amount, records, latest)
                VALUES (NEW.account_id, NEW.chat_id, NEW.run_id, COALESCE(NEW.tool_key, ''), net, 1, NEW.created_at)
                ON CONFLICT (account_id, chat_id, run_id, tool_key) DO UPDATE SET amount = kept.amount + excluded.amount,
                    records = kept.records + 1, latest = GREATEST(kept.latest, excluded.latest);
            END IF;
        END IF;
        RETURN NULL;
    END
    $$;
    CREATE OR REPLACE TRIGGER credits_usage_counted AFTER INSERT ON credits_ledgerentry
    FOR EACH ROW WHEN (NEW.type IN ('CAPTURE', 'USAGE', 'REFUND')) EXECUTE FUNCTION credits_count_usage()
"""
_ADD = "amount = amount + excluded.amount, records = records + 1, latest = MAX(latest, excluded.latest)"
_NET = "CASE NEW.type WHEN 'REFUND' THEN -NEW.amount ELSE NEW.amount END, 1, NEW.created_at"
COUNT_SQLITE = [
    f"""
    CREATE TRIGGER credits_usage_by_day AFTER INSERT ON credits_ledgerentry WHEN NEW.type IN ('CAPTURE', 'USAGE')
    BEGIN
        INSERT INTO credits_daytotal (account_id, day, tool_key, amount, records, latest)
        VALUES (NEW.account_id, substr(NEW.created_at, 1, 10), COALESCE(NEW.tool_key, ''), NEW.amount, 1, NEW.created_at)
        ON CONFLICT (account_id, day, tool_key) DO UPDATE SET {_ADD};
    END
    """,
    f"""
    CREATE TRIGGER credits_usage_by_chat AFTER INSERT ON credits_ledgerentry
    WHEN NEW.type IN ('CAPTURE', 'USAGE', 'REFUND') AND NEW.chat_id IS NOT NULL
    BEGIN
        INSERT INTO credits_chattotal (account_id, chat_id, amount, records, latest)
        VALUES (NEW.account_id, NEW.chat_id, {_NET})
        ON CONFLICT (account_id, chat_id) DO UPDATE SET {_ADD};
        INSERT INTO credits_chatdaytotal (account_id, day, chat_id, amount, records, latest)
        VALUES (NEW.account_id, substr(NEW.created_at, 1, 10), NEW.chat_id, {_NET})
        ON CONFLICT (account_id, day, chat_id) DO UPDATE SET {_ADD};
    END
    """,
    f"""
    CREATE TRIGGER credits_usage_by_run AFTER INSERT ON credits_ledgerentry
    WHEN NEW.type IN ('CAPTURE', 'USAGE', 'REFUND') AND NEW.chat_id IS NOT NULL AND NEW.run_id IS NOT NULL
    BEGIN
        INSERT INTO credits_runtotal (account_id, chat_id, run_id, tool_key, amount, records, latest)
        VALUES (NEW.account_id, NEW.chat_id, NEW.run_id, COALESCE(NEW.tool_key, ''), {_NET})
        ON CONFLICT (account_id, chat_id, run_id, tool_key) DO UPDATE SET {_ADD};
    END
    """,
]
STOP_COUNTING = {
    "postgresql": ["DROP TRIGGER credits_usage_counted ON credits_ledgerentry", "DROP FUNCTION credits_count_usage()"],
    "sqlite": [f"DROP TRIGGER credits_usage_by_{what}" for what in ("day", "chat", "run")],
}


def start_counting(apps, schema_editor):
    for statement in {"postgresql": [COUNT_POSTGRESQL], "sqlite": COUNT_SQLITE}[schema_editor.connection.vendor]:
        schema_editor.execute(statement, params=None)


def stop_counting(apps, schema_editor):
    for statement in STOP_COUNTING[schema_editor.connection.vendor]:
        schema_editor.execute(statement, params=None)


class Migration(migrations.Migration):
    dependencies = [("credits", "0001_initial")]

    operations = [
        migrations.RunPython(seal, unseal),
        migrations.RunPython(start_counting, stop_counting),
    ]
