"""Ledger rows are never changed: triggers refuse every UPDATE and DELETE, and on PostgreSQL TRUNCATE.

A test database is emptied between tests, by TRUNCATE on PostgreSQL and by DELETE on SQLite, so those are open where the database's name says
that it is one. SQLite drops a table's triggers when a migration alters the table: such a migration must run ``seal`` again.
"""

from django.db import migrations

POSTGRESQL = [
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
SQLITE = [
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
    for statement in {"postgresql": POSTGRESQL, "sqlite": SQLITE}[schema_editor.connection.vendor]:
        schema_editor.execute(statement, params=None)


def unseal(apps, schema_editor):
    for statement in UNSEAL[schema_editor.connection.vendor]:
        schema_editor.execute(statement, params=None)


class Migration(migrations.Migration):
    dependencies = [("credits", "0001_initial")]

    operations = [migrations.RunPython(seal, unseal)]
