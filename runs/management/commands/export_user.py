"""Print all that is kept of a person."""

from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from config.management import progress, user_named
from runs.privacy import export


class Command(BaseCommand):
    help = "Print all that is kept of USERNAME as lines of JSON (docs/privacy.md), without secrets."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("username")

    def handle(self, *args: Any, username: str, **options: Any) -> None:
        user = user_named(username)
        # Lines that scroll over a terminal show the progress themselves.
        for line in export(user) if self.stdout.isatty() else export(user, progress(self.stderr)):
            self.stdout.write(line)
