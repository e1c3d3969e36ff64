"""The subcommands of ``manage.py catalogue``, one file each. They raise ValueError with a message for staff."""

from runs.management.catalogue.base import Subcommand
from runs.management.catalogue.file import Apply, Export
from runs.management.catalogue.import_mcp import ImportMcp

SUBCOMMANDS: dict[str, Subcommand] = {"apply": Apply(), "export": Export(), "import-mcp": ImportMcp()}
