"""No refund or adjustment without the member of staff who made it. SQLite makes the table anew, without its triggers."""

from importlib import import_module

from django.db import migrations, models

seal = import_module("credits.migrations.0002_seal_ledger").seal
start_counting = import_module("credits.migrations.0004_usage_totals").start_counting


class Migration(migrations.Migration):
    dependencies = [("credits", "0005_count_usage")]

    operations = [
        migrations.RunPython(migrations.RunPython.noop, start_counting),
        migrations.RunPython(migrations.RunPython.noop, seal),
        migrations.AddConstraint(
            model_name="ledgerentry",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(("type__in", ["REFUND", "ADJUSTMENT"]), _negated=True), ("staff__isnull", False), _connector="OR"
                ),
                name="ledger_correction_has_staff",
            ),
        ),
        migrations.RunPython(seal, migrations.RunPython.noop),
        migrations.RunPython(start_counting, migrations.RunPython.noop),
    ]
