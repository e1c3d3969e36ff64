"""The catalogue that a new installation starts with. Rows that staff changed or made are left alone."""

from django.db import migrations

from runs.seed import MODELS, TOOLS


def add(apps, schema_editor):
    for name, rows in (("AgentModel", MODELS), ("Tool", TOOLS)):
        model = apps.get_model("runs", name)
        for row in rows:
            model.objects.get_or_create(name=row["name"], defaults=row)


class Migration(migrations.Migration):
    dependencies = [("runs", "0001_initial")]
    operations = [migrations.RunPython(add, migrations.RunPython.noop)]
