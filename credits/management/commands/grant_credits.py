from datetime import UTC, datetime, timedelta
from typing import Any

from django.core.management.base import CommandParser

from config.kernel import clock, money
from config.kernel.ids import new_id
from config.management import user_named
from credits import ledger
from credits.management.moving import MovingCommand
from credits.models import GRANT_DAYS_MAX


class Command(MovingCommand):
    help = "Grant AMOUNT credits to USERNAME."
    by_staff = False

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--expires",
            metavar="WHEN",
            help="when the unspent part expires: days from now, or a time such as 2027-01-31T00:00:00Z",
        )

    def move(self, micro: int, username: str, reason: str, **options: Any) -> tuple[str, int]:
        expires = options.get("expires")
        end = None if expires is None else parse_end(expires)
        user = user_named(username)
        ledger.grant(user.pk, micro, cause=f"command:{new_id('grant')}", reason=reason, expires_at=end)
        until = f" until {clock.iso(end)}" if end else ""
        return f"Granted {money.to_text(micro)} credits to {username}{until}", user.pk


def parse_end(text: str) -> datetime:
    """A number of days from now, or an ISO 8601 time with its zone, as UTC."""
    now = clock.now()
    try:
        if text.isascii() and text.isdigit():
            # Truncated: Python rejects very long numbers and very many days.
            end = now + timedelta(days=min(int(text[:9]), GRANT_DAYS_MAX + 1))
        else:
            end = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError("--expires must be a number of days or a time such as 2027-01-31T00:00:00Z.") from None
    if end.tzinfo is None:
        raise ValueError("--expires must name its time zone, such as 2027-01-31T00:00:00Z.")
    if end <= now:
        raise ValueError("--expires must be in the future.")
    if end > now + timedelta(days=GRANT_DAYS_MAX):
        raise ValueError(f"--expires must be at most {GRANT_DAYS_MAX} days from now.")
    return end.astimezone(UTC)
