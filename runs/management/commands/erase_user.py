"""Remove all content, files, events and names of a person."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from config.kernel.errors import DomainError
from config.management import progress, user_named
from runs.privacy.erase import NotErased, erase


class Command(BaseCommand):
    help = (
        "Remove all content, files, events and names of USERNAME at once, permanently. "
        "The ledger stays, under a pseudonym. A command that was interrupted can be repeated."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("username")
        parser.add_argument("--reason", required=True, help="stored with the pseudonym; must not name the person")

    def handle(self, *args: Any, username: str, reason: str, **options: Any) -> None:
        user = user_named(username)
        if user.is_staff or user.is_superuser:
            raise CommandError(f"{username} is a staff account. Remove its staff status first.")
        if not reason.strip():
            raise CommandError("--reason must not be empty.")
        if username.lower() in reason.lower():
            raise CommandError("--reason is stored and must not contain the username.")
        try:
            pseudonym = erase(user, reason.strip(), progress(self.stderr))
        except (NotErased, DomainError) as error:
            raise CommandError(f"Not everything is erased yet. {error} Repeat the command.") from None
        self.stdout.write(f"Erased. The ledger stays under the name {pseudonym}.")
