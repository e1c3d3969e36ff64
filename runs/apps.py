from django.apps import AppConfig
from django.db.models.signals import post_migrate


class RunsConfig(AppConfig):
    name = "runs"

    def ready(self) -> None:
        from runs import checks, purge  # noqa: F401  (register the system check and the receiver of chat_purged)
        from runs.catalogue.seeds import add_builtin_tools

        post_migrate.connect(add_builtin_tools, sender=self, dispatch_uid="runs.builtin_tools")
