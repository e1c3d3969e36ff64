from typing import Any

from django.core.management.base import BaseCommand, CommandError

from config.management import progress
from credits.reconcile import drift


class Command(BaseCommand):
    help = "Compare the accounts with the ledger. Prints each difference, then exits with 1. Changes nothing."

    def handle(self, *args: Any, **options: Any) -> None:
        found = 0
        for line in drift(progress(self.stderr, line_seconds=0)):
            found += 1
            self.stdout.write(line)
        if found:
            raise CommandError(f"{found} {'difference' if found == 1 else 'differences'} found.")
        self.stdout.write("Every account agrees with its ledger.")
