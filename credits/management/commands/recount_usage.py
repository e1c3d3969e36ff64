"""Rebuild the totals of the usage reports from the ledger."""

from typing import Any

from django.core.management.base import BaseCommand

from config.management import progress
from credits import reconcile
from credits.models import Account

ACCOUNTS_BATCH = 50


class Command(BaseCommand):
    help = "Rebuild the totals of the usage reports from the ledger. The ledger and the accounts do not change."

    def handle(self, *args: Any, **options: Any) -> None:
        accounts = list(Account.objects.order_by("pk").values_list("pk", flat=True))
        show = progress(self.stderr)
        for begin in range(0, len(accounts), ACCOUNTS_BATCH):
            batch = accounts[begin : begin + ACCOUNTS_BATCH]
            reconcile.recount(batch)
            show("accounts counted", begin + len(batch), len(accounts))
        self.stdout.write(f"Counted the usage of {len(accounts)} accounts.")
