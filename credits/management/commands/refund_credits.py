"""Refund a ledger row."""

from typing import Any

from django.core.management.base import CommandParser

from config.kernel import money
from config.kernel.errors import NotFound
from config.kernel.ids import is_plausible_id
from credits import ledger
from credits.management.moving import MovingCommand


class Command(MovingCommand):
    help = "Refund AMOUNT credits of the CAPTURE or USAGE row ENTRY. The sum of its refunds is at most its amount."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("entry", help="the row's id, as led_…")
        super().add_arguments(parser)

    def handle(self, *args: Any, entry: str, amount: str, reason: str, staff: str, **options: Any) -> None:
        if not is_plausible_id(entry):
            raise NotFound("Only a CAPTURE or USAGE row can be refunded.")
        row = ledger.refund(entry, self.amount(amount), reason=reason, staff=self.staff(staff))
        self.report(f"Refunded {money.to_text(row.amount)} credits of {entry}", row.account_id)
