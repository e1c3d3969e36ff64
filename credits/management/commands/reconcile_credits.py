"""Compare each account with its ledger."""

from contextlib import closing
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from config.management.progress import Progress
from credits.reconcile import drift


class Command(BaseCommand):
    help = "Compare the accounts with the ledger. Prints each difference, then exits with 1. Changes nothing."

    def handle(self, *args: Any, **options: Any) -> None:
        found = 0
        with closing(Progress(self.stderr, line_seconds=0)) as progress:
            for line in drift(progress.show):
                found += 1
                progress.close()
                self.stdout.write(line)
        if found:
            raise CommandError(f"{found} {'difference' if found == 1 else 'differences'} found.")
        self.stdout.write("Every account agrees with its ledger.")
