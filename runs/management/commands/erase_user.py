"""Remove all content, files, events and names of a person."""

import sys
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from config.kernel.errors import Conflict, DomainError
from config.management import progress, reason_of, user_named
from runs.privacy import NotErased, erase

YES = ("y", "yes")


class Command(BaseCommand):
    help = (
        "Remove all content, files, events and names of USERNAME at once, permanently. "
        "The ledger stays, under a pseudonym. A command that was interrupted can be repeated."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("username")
        parser.add_argument("--reason", required=True, help="stored with the pseudonym; must not name the person")
        parser.add_argument("--yes", action="store_true", help="do not ask")

    def handle(self, *args: Any, username: str, reason: str, yes: bool, **options: Any) -> None:
        user, reason = user_named(username), reason_of(reason)
        if not yes and not (sys.stdin.isatty() and input(f"Erase {username} permanently? [y/N] ").lower() in YES):
            raise CommandError("Nothing was erased: confirm it, or use --yes.")
        try:
            pseudonym = erase(user, reason, progress(self.stderr))
        except Conflict as error:
            raise CommandError(str(error)) from None
        except (NotErased, DomainError) as error:
            raise CommandError(f"Not everything is erased yet. {error} Repeat the command.") from None
        self.stdout.write(f"Erased. The ledger stays under the name {pseudonym}.")
