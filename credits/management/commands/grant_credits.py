"""Grant credits to a user."""

from typing import Any

from django.core.management.base import CommandParser

from config.kernel import clock, money
from config.kernel.ids import new_id
from credits import ledger
from credits.management.moving import MovingCommand


class Command(MovingCommand):
    help = "Grant AMOUNT credits to USERNAME."
    by_staff = False

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("username")
        super().add_arguments(parser)
        parser.add_argument(
            "--expires",
            metavar="WHEN",
            help="when the unspent part expires: days from now, or a time such as 2027-01-31T00:00:00Z",
        )

    def handle(
        self, *args: Any, username: str, amount: str, reason: str, expires: str | None = None, **options: Any
    ) -> None:
        user, micro = self.move(username, amount, reason)
        end = None if expires is None else self.end(expires)
        ledger.grant(user.pk, micro, cause=f"command:{new_id('grant')}", reason=reason, expires_at=end)
        until = f" until {clock.iso(end)}" if end else ""
        self.report(f"Granted {money.to_text(micro)} credits to {username}{until}", user.pk)
