from typing import Any

from config.kernel import money
from config.management import user_named
from credits import ledger
from credits.management.moving import MovingCommand


class Command(MovingCommand):
    help = "Add AMOUNT credits to the account of USERNAME. A negative AMOUNT removes credits, even below zero."

    def move(self, micro: int, username: str, reason: str, staff: Any, **options: Any) -> tuple[str, int]:
        row = ledger.adjust(user_named(username).pk, micro, reason=reason, staff=staff)
        return f"Adjusted {username} by {money.to_text(micro)} credits", row.account_id
