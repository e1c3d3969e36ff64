"""``catalogue import-mcp``: the tools of an MCP server become rows of the catalogue."""

from __future__ import annotations

from typing import Any, ClassVar

from django.core.management.base import CommandParser, OutputWrapper

from config.kernel import money
from config.kernel.jsontext import to_text
from runs.catalogue.file.base import with_variables
from runs.catalogue.imports import import_mcp


class ImportMcp:
    help: ClassVar[str] = "Add the tools of an MCP server, and update those that are known."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("url", metavar="URL", help="the server's streamable-HTTP address")
        parser.add_argument(
            "--header",
            action="append",
            default=[],
            metavar="NAME=VALUE",
            help="a secret header for the server; ${VARIABLE} in it is replaced from the environment",
        )
        parser.add_argument("--prefix", default="", help="precedes the names of new tools")
        parser.add_argument("--price", default="0", help="credits a call, of new tools")

    def handle(self, out: OutputWrapper, options: dict[str, Any]) -> None:
        headers = dict(_header(text) for text in options["header"])
        imported = import_mcp(
            options["url"],
            headers=to_text(headers) if headers else "",
            prefix=options["prefix"],
            price=money.parse(options["price"], minimum=0, field="--price"),
        )
        for what, tools in (("added", imported.added), ("changed", imported.changed)):
            for tool in tools:
                out.write(f"{what}: {tool.name}")
        for name, reason in imported.skipped:
            out.write(f"skipped: {name}: {reason}")
        out.write(f"{imported}.")


def _header(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign:
        raise ValueError("--header must be NAME=VALUE.")
    return name, with_variables(value)
