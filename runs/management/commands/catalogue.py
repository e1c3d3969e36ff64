"""Change the catalogue from the command line. Each subcommand is a class of ``runs.management.catalogue``."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from config.management.progress import Progress
from runs.management.catalogue import SUBCOMMANDS


class Command(BaseCommand):
    help = "Change the catalogue of models, tools and agents, or write it as a file."

    def add_arguments(self, parser: CommandParser) -> None:
        parsers = parser.add_subparsers(dest="subcommand", required=True)
        for name, subcommand in SUBCOMMANDS.items():
            subcommand.add_arguments(parsers.add_parser(name, help=subcommand.help))

    def handle(self, *args: Any, subcommand: str, **options: Any) -> None:
        try:
            with closing(Progress(self.stderr)) as progress:
                SUBCOMMANDS[subcommand].handle(self.stdout, options | {"progress": progress})
        except ValueError as error:
            raise CommandError(str(error)) from None
