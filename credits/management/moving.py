"""The base of the commands that move credits: their arguments, and errors as one line without a traceback."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from django.contrib.auth import get_user_model
from django.core.management.base import BaseCommand, CommandError, CommandParser

from config.kernel import clock, money
from config.kernel.errors import DomainError
from credits import ledger
from credits.models import GRANT_DAYS_MAX


class MovingCommand(BaseCommand):
    amounts = "more than 0"
    by_staff = True

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("amount", help=f"credits, {self.amounts}, with at most 6 decimals")
        parser.add_argument("--reason", required=True, help="stored with the ledger row")
        if self.by_staff:
            parser.add_argument(
                "--staff", required=True, metavar="USERNAME", help="the member of staff; stored with the ledger row"
            )

    def report(self, done: str, user_id: int) -> None:
        self.stdout.write(f"{done}; available now: {money.to_text(ledger.available(user_id))}.")

    def move(self, username: str, amount: str, reason: str, minimum: int | None = 1) -> tuple[Any, int]:
        """Returns the user and the micro-credits. Also validates the reason."""
        user = self.user(username)
        if not reason.strip():
            raise CommandError("--reason must not be empty.")
        return user, self.amount(amount, minimum)

    def amount(self, amount: str, minimum: int | None = 1) -> int:
        try:
            return money.parse(amount, minimum=minimum, field="AMOUNT")
        except ValueError as error:
            raise CommandError(str(error)) from None

    def end(self, text: str) -> datetime:
        """A number of days from now, or an ISO 8601 time with its zone, as UTC."""
        now = clock.now()
        latest = now + timedelta(days=GRANT_DAYS_MAX)
        try:
            in_days = text.isascii() and text.isdigit()
            # Truncated: Python rejects very long numbers and very many days.
            days = min(int(text[:9]), GRANT_DAYS_MAX + 1) if in_days else 0
            end = now + timedelta(days=days) if in_days else datetime.fromisoformat(text)
        except ValueError:
            raise CommandError("--expires must be a number of days or a time such as 2027-01-31T00:00:00Z.") from None
        if end.tzinfo is None:
            raise CommandError("--expires must name its time zone, such as 2027-01-31T00:00:00Z.")
        if end <= now:
            raise CommandError("--expires must be in the future.")
        if end > latest:
            raise CommandError(f"--expires must be at most {GRANT_DAYS_MAX} days from now.")
        return end.astimezone(UTC)

    def user(self, username: str, **also: bool) -> Any:
        users = get_user_model()._default_manager.filter(username=username, **also)
        user = users.first() if "\0" not in username else None
        if user is None:
            raise CommandError(f"There is no {'staff ' if also else ''}user {username!r}.")
        return user

    def staff(self, username: str) -> Any:
        return self.user(username, is_staff=True, is_active=True)

    def execute(self, *args: Any, **options: Any) -> str | None:
        try:
            return super().execute(*args, **options)
        except DomainError as error:
            raise CommandError(str(error)) from None
