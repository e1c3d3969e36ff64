"""What a subcommand of ``manage.py catalogue`` is."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from django.core.management.base import CommandParser, OutputWrapper


class Subcommand(Protocol):
    help: ClassVar[str]

    def add_arguments(self, parser: CommandParser) -> None: ...

    def handle(self, out: OutputWrapper, options: dict[str, Any]) -> None: ...
