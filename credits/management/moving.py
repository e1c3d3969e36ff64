"""The base of the commands that move credits: their arguments, and errors as one line without a traceback."""

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from config.kernel import money
from config.kernel.errors import DomainError
from config.management import reason_of, user_named
from credits import ledger


class MovingCommand(BaseCommand):
    target: dict[str, Any] = {"dest": "username"}
    by_staff = True

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(**self.target)
        parser.add_argument("amount", help="credits, with at most 6 decimals")
        parser.add_argument("--reason", required=True, help="stored with the ledger row")
        if self.by_staff:
            parser.add_argument(
                "--staff", required=True, metavar="USERNAME", help="the member of staff; stored with the ledger row"
            )

    def handle(self, *args: Any, amount: str, reason: str, staff: str = "", **options: Any) -> None:
        options["reason"] = reason_of(reason)
        if self.by_staff:
            options["staff"] = user_named(staff, "staff ", is_staff=True, is_active=True)
        try:
            micro = money.parse(amount, minimum=None if self.by_staff else 1, field="AMOUNT")
            done, user_id = self.move(micro, **options)
        except (DomainError, ValueError) as error:
            raise CommandError(str(error)) from None
        self.stdout.write(f"{done}; available now: {money.to_text(ledger.account_for(user_id).available)}.")

    def move(self, *args: Any, **options: Any) -> tuple[str, int]:
        """Move these micro-credits. Returns what was done, and the id of the account's user."""
        raise NotImplementedError
