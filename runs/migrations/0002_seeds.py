"""The rows that a new installation starts with: the demo model and the roles of staff. ``runs.catalogue.seeds`` adds
the built-in tools after each migration.
"""

from django.apps import apps as installed
from django.conf import settings
from django.contrib.auth.management import create_permissions
from django.db import migrations

from runs.catalogue.seeds import MODELS, PROVIDERS, install_roles

APPS = ["admin", "apikeys", "auth", "chats", "credits", "runs", "webhooks"]


def add_models(apps, schema_editor):
    Provider = apps.get_model("runs", "Provider")
    for row in PROVIDERS:
        Provider.objects.get_or_create(name=row["name"], defaults=row)
    for row in MODELS:
        values = row | {"provider": Provider.objects.get(name=row["provider"])}
        apps.get_model("runs", "AgentModel").objects.get_or_create(name=row["name"], defaults=values)


def add_roles(apps, schema_editor):
    # Django makes permissions after all migrations, which is too late for these groups.
    for label in APPS:
        create_permissions(
            installed.get_app_config(label), verbosity=0, using=schema_editor.connection.alias, apps=apps
        )
    install_roles(apps.get_model("auth", "Group"), apps.get_model("auth", "Permission"))


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
        migrations.RunPython(add_models, migrations.RunPython.noop),
        migrations.RunPython(add_roles, migrations.RunPython.noop),
    ]
