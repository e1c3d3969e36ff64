"""Give a user credits."""

from typing import Any

from django.contrib.auth import get_user_model
from django.core.management.base import BaseCommand, CommandError, CommandParser

from config.api import money
from config.api.errors import DomainError
from config.api.ids import new_id
from credits import ledger


class Command(BaseCommand):
    help = "Grant AMOUNT credits to USERNAME."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("username")
        parser.add_argument("amount", help="credits, more than 0, with at most 6 decimals")
        parser.add_argument("--reason", required=True, help="why; kept with the ledger row")

    def handle(self, *args: Any, username: str, amount: str, reason: str, **options: Any) -> None:
        user = get_user_model()._default_manager.filter(username=username).first() if "\0" not in username else None
        if user is None:
            raise CommandError(f"There is no user {username!r}.")
        if not reason.strip():
            raise CommandError("--reason must not be empty.")
        try:
            micro = money.parse(amount, minimum=1, field="AMOUNT")
            ledger.grant(user.pk, micro, cause=f"command:{new_id('grant')}", reason=reason)
        except (ValueError, DomainError) as error:
            raise CommandError(str(error)) from None
        available = money.to_text(ledger.available(user.pk))
        self.stdout.write(f"Granted {money.to_text(micro)} credits to {username}; available now: {available}.")
