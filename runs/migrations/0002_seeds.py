"""What a new installation starts with: the catalogue of models and tools, and the roles of staff.

Rows that staff changed or made are left alone.
"""

from django.apps import apps as installed
from django.conf import settings
from django.contrib.auth.management import create_permissions
from django.db import migrations

from runs import roles
from runs.catalogue.seeds import MODELS, TOOLS

APPS = ["admin", "apikeys", "auth", "chats", "credits", "runs", "webhooks"]


def add_catalogue(apps, schema_editor):
    for name, rows in (("AgentModel", MODELS), ("Tool", TOOLS)):
        model = apps.get_model("runs", name)
        for row in rows:
            model.objects.get_or_create(name=row["name"], defaults=row)


def add_roles(apps, schema_editor):
    # Django makes permissions after all migrations, which is too late for these groups.
    for label in APPS:
        create_permissions(
            installed.get_app_config(label), verbosity=0, using=schema_editor.connection.alias, apps=apps
        )
    roles.install(apps.get_model("auth", "Group"), apps.get_model("auth", "Permission"))


class Migration(migrations.Migration):
    dependencies = [
        ("runs", "0001_initial"),
        ("apikeys", "0001_initial"),
        ("chats", "0001_initial"),
        ("credits", "0002_triggers"),
        ("webhooks", "0001_initial"),
        ("admin", "0003_logentry_add_action_flag_choices"),
        ("auth", "0012_alter_user_first_name_max_length"),
        ("contenttypes", "0002_remove_content_type_name"),
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]
    operations = [
        migrations.RunPython(add_catalogue, migrations.RunPython.noop),
        migrations.RunPython(add_roles, migrations.RunPython.noop),
    ]
