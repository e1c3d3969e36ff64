from typing import Any

from django.apps import AppConfig
from django.conf import settings
from django.db.models.signals import post_save


class CreditsConfig(AppConfig):
    name = "credits"

    def ready(self) -> None:
        post_save.connect(open_account, sender=settings.AUTH_USER_MODEL, dispatch_uid="credits.open_account")


def open_account(instance: Any, created: bool, raw: bool, **kwargs: Any) -> None:
    """Opens an account for a new user, in the transaction that creates the user."""
    from credits import ledger

    if created and not raw:  # A fixture (raw) contains its own accounts and rows.
        ledger.open_account(instance)
