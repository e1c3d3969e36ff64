"""Opens an account for each new user, in the transaction that creates the user. Nothing else belongs here."""

from typing import Any

from django.conf import settings
from django.db.models.signals import post_save
from django.dispatch import receiver

from credits import ledger


@receiver(post_save, sender=settings.AUTH_USER_MODEL, dispatch_uid="credits.open_account")
def open_account(instance: Any, created: bool, raw: bool, **kwargs: Any) -> None:
    # A fixture (raw) contains its own accounts and rows.
    if created and not raw:
        ledger.open_account(instance)
