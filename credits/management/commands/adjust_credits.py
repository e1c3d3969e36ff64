"""Adjust the account of a user."""

from typing import Any

from django.core.management.base import CommandParser

from config.kernel import money
from credits import ledger
from credits.management.moving import MovingCommand


class Command(MovingCommand):
    help = "Add AMOUNT credits to the account of USERNAME. A negative AMOUNT removes credits, even below zero."
    amounts = "not 0"

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("username")
        super().add_arguments(parser)

    def handle(self, *args: Any, username: str, amount: str, reason: str, staff: str, **options: Any) -> None:
        user, micro = self.move(username, amount, reason, minimum=None)
        ledger.adjust(user.pk, micro, reason=reason, staff=self.staff(staff))
        self.report(f"Adjusted {username} by {money.to_text(micro)} credits", user.pk)
