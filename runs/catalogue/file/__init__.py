"""The catalogue as a YAML file: ``apply`` brings the tables to what a file says, ``export`` writes such a file.

A section of the file is an object of ``SECTIONS``. A mistake anywhere changes nothing, and is told with its line.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import connection, transaction

from config.api.serializers import unknown_fields
from config.kernel import yamltext
from config.kernel.yamltext import MalformedYAML, Node
from runs import catalogue
from runs.catalogue.file.agents import Agents
from runs.catalogue.file.base import CatalogueError, Mistake, Section, Variables, Work, printable
from runs.catalogue.file.installation import Installation
from runs.catalogue.file.tables import MODELS, PROVIDERS, TOOLS
from runs.catalogue.file.uses import warn_of_disabled
from runs.tools.base import shorten

logger = logging.getLogger(__name__)

# In the order in which they refer to each other.
SECTIONS: tuple[Section, ...] = (PROVIDERS, MODELS, TOOLS, Agents(), Installation())
# The levels of a file around a value of a row.
LEVELS = 3
LOG_MAX_CHARS = 4000


def apply(
    source: str,
    raw: bytes,
    *,
    prune: bool = False,
    check: bool = False,
    report: Callable[[str, int, int], object] = lambda *step: None,
) -> Work:
    """Bring the catalogue to what the file says; with ``check``, only find out what would change. ``prune`` disables
    the rows that a table of the file does not list. ``source`` names the file in messages.
    ``report`` gets the progress: a step, how many parts of the file are done, and their number.

    Raises CatalogueError. Resolves a host on the network: no transaction may be open.
    """
    work = Work(prune)
    found = _read(source, raw, work)
    _stop(source, work)
    with transaction.atomic():
        _lock()
        for done, section in enumerate(SECTIONS):
            report(f"parts of the catalogue: {section.name}", done, len(SECTIONS))
            if section.name in found:
                section.apply(found[section.name], work)
                _stop(source, work)
        warn_of_disabled(work)
        if check:
            transaction.set_rollback(True)
        else:
            transaction.on_commit(catalogue.forget)
    if work.changes and not check:
        summary = "; ".join(change.summary() for change in work.changes)
        logger.info("the catalogue file changed %s", shorten(summary, LOG_MAX_CHARS))
    return work


def _read(source: str, raw: bytes, work: Work) -> dict[str, Any]:
    """What the sections read of the file."""
    if len(raw) > settings.CATALOGUE_MAX_BYTES:
        limit = f"At most {settings.CATALOGUE_MAX_BYTES} bytes (CATALOGUE_MAX_BYTES)."
        raise CatalogueError(source, [Mistake(1, "", limit)])
    try:
        root = yamltext.parse(raw, depth=settings.API_MAX_JSON_DEPTH + LEVELS)
    except MalformedYAML as error:
        raise CatalogueError(source, [Mistake(error.line, "", error.message)]) from None
    names = [section.name for section in SECTIONS]
    if not isinstance(root.value, dict):
        raise CatalogueError(source, [Mistake(root.line, "", f"A mapping of {', '.join(names)} is required.")])
    for key, node in root.value.items():
        for messages in unknown_fields({key: None}, names).values():
            work.wrong(node.line, key[:100], " ".join(messages))
    tables: dict[str, Node] = root.value
    return {section.name: section.read(tables[section.name], work) for section in SECTIONS if section.name in tables}


def _stop(source: str, work: Work) -> None:
    if work.mistakes:
        raise CatalogueError(source, work.mistakes)


def _lock() -> None:
    """Two files are applied one after the other. On SQLite, each transaction that writes does that.

    Readers of the tables do not wait. Locked rows would not suffice: a table may have none.
    """
    if connection.vendor == "postgresql":
        tables = ", ".join(connection.ops.quote_name(rows.model._meta.db_table) for rows in (PROVIDERS, MODELS, TOOLS))
        with connection.cursor() as cursor:
            cursor.execute(f"LOCK TABLE {tables} IN SHARE ROW EXCLUSIVE MODE")


def export() -> str:
    """The catalogue as a file without secrets. Raises ValueError if a part of it cannot be read."""
    variables = Variables()
    with transaction.atomic():
        written = {section.name: section.export(variables) for section in SECTIONS}
    comment = ["The catalogue (docs/catalogue.md).", *variables.notes]
    if variables.names:
        comment += ["Secrets are variables of the environment in which the file is applied:"]
        comment += [f"  {name}" for name in variables.names]
    head = "".join(f"# {printable(line)}\n" for line in comment)
    return head + yamltext.to_text({name: table for name, table in written.items() if table})


def read_file(path: Path) -> bytes:
    """The file, and one byte more than is allowed at most. Raises ValueError."""
    try:
        with path.open("rb") as file:
            return file.read(settings.CATALOGUE_MAX_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from None
