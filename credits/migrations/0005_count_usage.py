"""The totals of what was spent before they were kept, some accounts at a time.

Not one transaction: an account is locked only while its own rows are counted, and may be counted twice.
"""

from django.db import migrations, transaction

ACCOUNTS_BATCH = 50
_NET = "SUM(CASE type WHEN 'REFUND' THEN -amount ELSE amount END), COUNT(*), MAX(created_at)"
_SPENDING = "type IN ('CAPTURE', 'USAGE', 'REFUND') AND chat_id IS NOT NULL"
_DAY = {"postgresql": "(created_at AT TIME ZONE 'UTC')::date", "sqlite": "substr(created_at, 1, 10)"}
# Table: its keys and where each comes from, what is summed, which rows.
TOTALS = {
    "credits_daytotal": (
        {"day": "{day}", "tool_key": "COALESCE(tool_key, '')"},
        "SUM(amount), COUNT(*), MAX(created_at)",
        "type IN ('CAPTURE', 'USAGE')",
    ),
    "credits_chattotal": ({"chat_id": "chat_id"}, _NET, _SPENDING),
    "credits_chatdaytotal": ({"day": "{day}", "chat_id": "chat_id"}, _NET, _SPENDING),
    "credits_runtotal": (
        {"chat_id": "chat_id", "run_id": "run_id", "tool_key": "COALESCE(tool_key, '')"},
        _NET,
        f"{_SPENDING} AND run_id IS NOT NULL",
    ),
}


def count(apps, schema_editor):
    connection = schema_editor.connection
    accounts = apps.get_model("credits", "Account").objects.using(connection.alias).order_by("pk")
    last = 0
    while True:
        with transaction.atomic(using=connection.alias), connection.cursor() as cursor:
            # Whoever writes a row of an account changes the account first: none comes in between.
            found = list(accounts.filter(pk__gt=last).select_for_update().values_list("pk", flat=True)[:ACCOUNTS_BATCH])
            if not found:
                return
            these = ", ".join(["%s"] * len(found))
            for table, (keys, sums, condition) in TOTALS.items():
                sources = ", ".join(keys.values()).format(day=_DAY[connection.vendor])
                cursor.execute(f"DELETE FROM {table} WHERE account_id IN ({these})", found)
                cursor.execute(
                    f"INSERT INTO {table} (account_id, {', '.join(keys)}, amount, records, latest)"
                    f" SELECT account_id, {sources}, {sums} FROM credits_ledgerentry"
                    f" WHERE account_id IN ({these}) AND {condition} GROUP BY account_id, {sources}",
                    found,
                )
            last = found[-1]


class Migration(migrations.Migration):
    atomic = False
    dependencies = [("credits", "0004_usage_totals")]

    operations = [migrations.RunPython(count, migrations.RunPython.noop)]
