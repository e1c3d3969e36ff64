from datetime import datetime, timedelta
from typing import Any

from django.core.management.base import CommandParser

from config.kernel import clock, money
from config.kernel.ids import new_id
from config.management import user_named
from credits import grants, ledger
from credits.management.moving import MovingCommand
from credits.models import GRANT_DAYS_MAX


class Command(MovingCommand):
    help = "Grant AMOUNT credits to USERNAME."
    by_staff = False

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        text = "when the unspent part expires: days from now, or a time such as 2027-01-31T00:00:00Z"
        parser.add_argument("--expires", metavar="WHEN", help=text)

    def move(self, micro: int, username: str, reason: str, expires: str | None, **options: Any) -> tuple[str, int]:
        end = None if expires is None else parse_end(expires)
        user = user_named(username)
        ledger.grant(user.pk, micro, cause=f"command:{new_id('grant')}", reason=reason, expires_at=end)
        until = f" until {clock.iso(end)}" if end else ""
        return f"Granted {money.to_text(micro)} credits to {username}{until}", user.pk


def parse_end(text: str) -> datetime:
    """A number of days from now, or an ISO 8601 time with its zone. Raises ValueError."""
    now = clock.now()
    if text.isascii() and text.isdigit():
        # Truncated: Python rejects very long numbers and very many days.
        text = (now + timedelta(days=min(int(text[:9]), GRANT_DAYS_MAX + 1))).isoformat()
    try:
        end = grants.end_of_grant(text)
    except ValueError as error:
        raise ValueError(f"--expires: {error}") from None
    if end <= now:
        raise ValueError("--expires: The time must be in the future.")
    return end
