"""Prints a session token of the local issuer. The last line contains only the token."""

from argparse import ArgumentParser
from typing import Any

from django.conf import settings
from django.contrib.auth import get_user_model
from django.core.management.base import BaseCommand, CommandError

from config.api.authentication import user_of, username_of
from config.api.session_tokens import mint

HOURS_MAX = 24 * 365


class Command(BaseCommand):
    help = "Print a session token for USERNAME (only without SESSION_ISSUER)."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("username")
        parser.add_argument("--create", action="store_true", help="create the user if it does not exist")
        parser.add_argument("--hours", type=float, default=12, help="validity of the token in hours (default 12)")

    def handle(self, *args: Any, username: str, create: bool, hours: float, **options: Any) -> None:
        if settings.SESSION_ISSUER:
            raise CommandError(f"The service does not issue tokens: SESSION_ISSUER is {settings.SESSION_ISSUER}.")
        if not 0 < hours <= HOURS_MAX:
            raise CommandError(f"--hours must be greater than 0 and at most {HOURS_MAX}.")
        if not username or username_of(username) != username:
            raise CommandError("This is not a username: use 1 to 150 printable characters.")
        user = get_user_model()._default_manager.filter(username=username).first()
        if user is None:
            if not create:
                raise CommandError(f"There is no user {username}. Add --create to create it.")
            user = user_of({"sub": username})
            self.stderr.write(f"created the user {username}")
        if user.is_staff or user.is_superuser:
            raise CommandError(f"{username} is a staff account, for which no session token can stand.")
        if not user.is_active:
            raise CommandError(f"The user {username} is not active.")
        self.stdout.write(mint(username, hours))
