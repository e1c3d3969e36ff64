"""``catalogue apply`` and ``catalogue export``: the catalogue as a YAML file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from django.conf import settings
from django.core.management.base import CommandError, CommandParser, OutputWrapper

from config.management.progress import Progress
from runs.catalogue import file


class Apply:
    help: ClassVar[str] = "Bring providers, models, tools, agents and the installation endpoint to what a file says."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "file", metavar="FILE", nargs="?", help="default: CATALOGUE_FILE; if it is empty, nothing is done"
        )
        parser.add_argument("--check", action="store_true", help="show what would change; exit 1 if anything would")
        parser.add_argument("--prune", action="store_true", help="disable what the tables of the file do not list")

    def handle(self, out: OutputWrapper, options: dict[str, Any]) -> None:
        name, check = options["file"] or settings.CATALOGUE_FILE, options["check"]
        if not name:
            out.write("There is no catalogue file (CATALOGUE_FILE).")
            return
        progress: Progress = options["progress"]
        given = {"prune": options["prune"], "check": check, "report": progress.show}
        work = file.apply(name, file.read_file(Path(name)), **given)
        progress.close()
        for change in work.changes:
            for line in change.lines():
                out.write(line)
        for warning in work.warnings:
            out.write(f"Warning: {warning}")
        if not work.changes:
            out.write(f"The catalogue is as {name} says.")
        elif check:
            raise CommandError(f"The catalogue differs from {name}.")
        else:
            out.write(f"Changed: {len(work.changes)}.")


class Export:
    help: ClassVar[str] = "Write the catalogue as a YAML file without secrets."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("file", metavar="FILE", nargs="?", help="default: the standard output")

    def handle(self, out: OutputWrapper, options: dict[str, Any]) -> None:
        text = file.export()
        if options["file"] is None:
            out.write(text, ending="")
            return
        try:
            Path(options["file"]).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ValueError(f"{options['file']} cannot be written: {error.strerror}.") from None
