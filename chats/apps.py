from django.apps import AppConfig


class ChatsConfig(AppConfig):
    name = "chats"

    def ready(self) -> None:
        from chats import checks  # noqa: F401  (registers the system checks)
