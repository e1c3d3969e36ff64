"""Change the catalogue of models, tools and agents from the command line, or write it as a file."""

from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from config.kernel import money
from config.kernel.jsontext import to_text
from runs.catalogue import file
from runs.catalogue.imports import import_mcp
from runs.catalogue.rules import with_variables


class Command(BaseCommand):
    help = "Change the catalogue of models, tools and agents, or write it as a file."

    def add_arguments(self, parser: CommandParser) -> None:
        add = parser.add_subparsers(dest="subcommand", required=True).add_parser
        path: dict[str, Any] = {"metavar": "FILE", "nargs": "?"}
        apply = add(
            "apply", help="Bring providers, models, tools, agents and the installation endpoint to what a file says."
        )
        apply.add_argument("file", **path, help="default: CATALOGUE_FILE; if it is empty, nothing is done")
        apply.add_argument("--check", action="store_true", help="show what would change; exit 1 if anything would")
        apply.add_argument("--prune", action="store_true", help="disable what the tables of the file do not list")
        export = add("export", help="Write the catalogue as a YAML file without secrets.")
        export.add_argument("file", **path, help="default: the standard output")
        imported = add("import-mcp", help="Add the tools of an MCP server, and update those that are known.")
        imported.add_argument("url", metavar="URL", help="the server's streamable-HTTP address")
        imported.add_argument(
            "--header",
            action="append",
            default=[],
            metavar="NAME=VALUE",
            help="a secret header for the server; ${VARIABLE} in it is replaced from the environment",
        )
        imported.add_argument("--prefix", default="", help="precedes the names of new tools")
        imported.add_argument("--price", default="0", help="credits a call, of new tools")

    def handle(self, *args: Any, subcommand: str, **options: Any) -> None:
        actions = {"apply": self.apply, "export": self.export, "import-mcp": self.import_mcp}
        try:
            actions[subcommand](options)
        except ValueError as error:
            raise CommandError(str(error)) from None
        except OSError as error:
            raise CommandError(f"{error.filename}: {error.strerror}.") from None

    def apply(self, options: dict[str, Any]) -> None:
        name, check = options["file"] or settings.CATALOGUE_FILE, options["check"]
        if not name:
            self.stdout.write("There is no catalogue file (CATALOGUE_FILE).")
            return
        work = file.apply(name, Path(name).read_bytes(), prune=options["prune"], check=check)
        for lines in work.changes.values():
            self.stdout.write("\n".join(lines))
        for warning in work.warnings:
            self.stdout.write(f"Warning: {warning}")
        if not work.changes:
            self.stdout.write(f"The catalogue is as {name} says.")
        elif check:
            raise CommandError(f"The catalogue differs from {name}.")
        else:
            self.stdout.write(f"Changed: {len(work.changes)}.")

    def export(self, options: dict[str, Any]) -> None:
        text = file.export()
        if options["file"] is None:
            self.stdout.write(text, ending="")
        else:
            Path(options["file"]).write_text(text, encoding="utf-8")

    def import_mcp(self, options: dict[str, Any]) -> None:
        given = [text.partition("=") for text in options["header"]]
        if not all(sign for _, sign, _ in given):
            raise ValueError("--header must be NAME=VALUE.")
        headers = {name: with_variables(value) for name, _, value in given}
        price = money.parse(options["price"], minimum=0, field="--price")
        sent = to_text(headers) if headers else ""
        imported = import_mcp(options["url"], headers=sent, prefix=options["prefix"], price=price)
        for what in ("added", "changed"):
            for tool in imported[what]:
                self.stdout.write(f"{what}: {tool.name}")
        for name, reason in imported["skipped"]:
            self.stdout.write(f"skipped: {name}: {reason}")
        if imported["added"]:
            self.stdout.write(
                "New tools are enabled: all runs can call them, except of agents with tools of their own."
            )
        self.stdout.write(f"{', '.join(f'{len(tools)} {what}' for what, tools in imported.items())}.")
