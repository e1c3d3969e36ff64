from typing import Any

from config.kernel import money
from credits import ledger
from credits.management.moving import MovingCommand


class Command(MovingCommand):
    help = "Refund AMOUNT credits of the CAPTURE or USAGE row ENTRY. The sum of its refunds is at most its amount."
    target = {"dest": "entry", "help": "the row's id, as led_…"}

    def move(self, micro: int, entry: str, reason: str, staff: Any, **options: Any) -> tuple[str, int]:
        row = ledger.refund(entry, micro, reason=reason, staff=staff)
        return f"Refunded {money.to_text(micro)} credits of {entry}", row.account_id
