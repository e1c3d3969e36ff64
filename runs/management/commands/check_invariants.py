"""Look for anything in the database that must never be."""

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from config.management import progress
from runs import lifecycle


class Command(BaseCommand):
    help = (
        "Check runs, streams, tool calls, credits, webhooks and chats against their rules; say what is wrong, exit 1."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--no-workers", action="store_true", help="for the copy of a backup: runs wait there for workers"
        )

    def handle(self, *args: Any, no_workers: bool = False, **options: Any) -> None:
        found = lifecycle.violations(progress(self.stderr, line_seconds=0), workers=not no_workers)
        for line in found:
            self.stdout.write(line)
        if found:
            raise CommandError(f"{len(found)} {'violation' if len(found) == 1 else 'violations'} found.")
        self.stdout.write("All invariants hold.")
