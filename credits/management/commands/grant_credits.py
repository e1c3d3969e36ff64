"""Give a user credits."""

from typing import Any

from django.core.management.base import CommandParser

from config.api import money
from config.api.ids import new_id
from credits import ledger
from credits.management.moving import MovingCommand


class Command(MovingCommand):
    help = "Grant AMOUNT credits to USERNAME."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("username")
        parser.add_argument("amount", help="credits, more than 0, with at most 6 decimals")
        self.add_reason(parser)

    def handle(self, *args: Any, username: str, amount: str, reason: str, **options: Any) -> None:
        user, micro = self.move(username, amount, reason)
        ledger.grant(user.pk, micro, cause=f"command:{new_id('grant')}", reason=reason)
        available = money.to_text(ledger.available(user.pk))
        self.stdout.write(f"Granted {money.to_text(micro)} credits to {username}; available now: {available}.")
