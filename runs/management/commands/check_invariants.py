"""Look for anything in the database that must never be."""

from typing import Any

from django.core.management.base import BaseCommand, CommandError

from runs import lifecycle


class Command(BaseCommand):
    help = (
        "Check runs, streams, tool calls, credits, webhooks and chats against their rules; say what is wrong, exit 1."
    )

    def handle(self, *args: Any, **options: Any) -> None:
        found = lifecycle.violations(self.stderr.write)
        for line in found:
            self.stdout.write(line)
        if found:
            raise CommandError(f"{len(found)} {'violation' if len(found) == 1 else 'violations'} found.")
        self.stdout.write("All invariants hold.")
