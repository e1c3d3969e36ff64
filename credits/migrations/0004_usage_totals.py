"""What the usage reports read: totals that triggers keep, in the transaction that writes the ledger row.

Triggers, because a total must not depend on who writes a row. An account's rows are written one after the other (each
changes the account first), so its totals are never fought over. Rows from before are counted by the next migration.
"""

import django.db.models.deletion
from django.db import migrations, models

import config.api.ids

POSTGRESQL = """
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
SQLITE = [
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
UNDO = {
    "postgresql": ["DROP TRIGGER credits_usage_counted ON credits_ledgerentry", "DROP FUNCTION credits_count_usage()"],
    "sqlite": [f"DROP TRIGGER credits_usage_by_{what}" for what in ("day", "chat", "run")],
}


def start_counting(apps, schema_editor):
    for statement in {"postgresql": [POSTGRESQL], "sqlite": SQLITE}[schema_editor.connection.vendor]:
        schema_editor.execute(statement, params=None)


def stop_counting(apps, schema_editor):
    for statement in UNDO[schema_editor.connection.vendor]:
        schema_editor.execute(statement, params=None)


def drop_like_index(apps, schema_editor):
    """Django adds an index for LIKE to a text primary key. Nothing asks for it, and every ledger row would pay."""
    if schema_editor.connection.vendor == "postgresql":
        with schema_editor.connection.cursor() as cursor:
            cursor.execute(
                "SELECT indexname FROM pg_indexes WHERE schemaname = current_schema()"
                " AND tablename = 'credits_ledgerentry' AND indexname LIKE '%\\_like'"
            )
            names = [name for (name,) in cursor.fetchall()]
        for name in names:
            schema_editor.execute(f"DROP INDEX {schema_editor.quote_name(name)}", params=None)


def total(name, **keys):
    return migrations.CreateModel(
        name=name,
        fields=[
            ("pk", models.CompositePrimaryKey("account", *keys, blank=True, editable=False, primary_key=True, serialize=False)),
            (
                "account",
                models.ForeignKey(
                    db_constraint=False,
                    db_index=False,
                    on_delete=django.db.models.deletion.PROTECT,
                    related_name="+",
                    to="credits.account",
                ),
            ),
            *keys.items(),
            ("amount", models.BigIntegerField()),
            ("records", models.BigIntegerField()),
            ("latest", models.DateTimeField()),
        ],
        options={"abstract": False},
    )


def reference():
    return config.api.ids.RefField(max_length=32)


class Migration(migrations.Migration):
    dependencies = [("credits", "0003_staff")]

    operations = [
        total("DayTotal", day=models.DateField(), tool_key=models.CharField(max_length=100)),
        total("ChatTotal", chat_id=reference()),
        total("ChatDayTotal", day=models.DateField(), chat_id=reference()),
        total("RunTotal", chat_id=reference(), run_id=reference(), tool_key=models.CharField(max_length=100)),
        migrations.RunPython(start_counting, stop_counting),
        migrations.RemoveIndex(model_name="ledgerentry", name="ledger_spending_by_time"),
        migrations.RemoveIndex(model_name="ledgerentry", name="ledger_spending_by_chat"),
        migrations.AddIndex(
            model_name="ledgerentry",
            index=models.Index(
                *map(models.F, ("account", "created_at", "type", "tool_key", "chat_id", "amount")),
                condition=models.Q(("type__in", ["CAPTURE", "USAGE", "REFUND"])),
                name="ledger_spending",
            ),
        ),
        migrations.RunPython(drop_like_index, migrations.RunPython.noop),
    ]
