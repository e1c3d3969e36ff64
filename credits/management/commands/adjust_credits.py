"""Adjust the account of a user."""

from typing import Any

from django.core.management.base import CommandParser

from config.kernel import money
from credits import ledger
from credits.management.moving import MovingCommand


class Command(MovingCommand):
    help = "Add AMOUNT credits to the account of USERNAME. A negative AMOUNT removes credits, even below zero."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("username")
        parser.add_argument("amount", help="credits, not 0, with at most 6 decimals")
        self.add_reason(parser)
        self.add_staff(parser)

    def handle(self, *args: Any, username: str, amount: str, reason: str, staff: str, **options: Any) -> None:
        user, micro = self.move(username, amount, reason, minimum=None)
        ledger.adjust(user.pk, micro, reason=reason, staff=self.staff(staff))
        available = money.to_text(ledger.available(user.pk))
        self.stdout.write(f"Adjusted {username} by {money.to_text(micro)} credits; available now: {available}.")
