from django.apps import AppConfig


class CreditsConfig(AppConfig):
    name = "credits"

    def ready(self) -> None:
        from credits import checks, signals  # noqa: F401  (registers the system checks and the receiver)
