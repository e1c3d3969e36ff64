"""The catalogue as a YAML file: ``apply`` brings the tables to what a file says, ``export`` writes such a file.

A mistake anywhere changes nothing, and is told with its line and field. Secrets are never written or told.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from django.conf import settings
from django.db import connection, transaction

from config.api.serializers import unknown_fields
from runs import catalogue
from runs.catalogue import versions, yaml
from runs.catalogue.providers import problem_of
from runs.catalogue.tables import TABLES
from runs.catalogue.work import Variables, Work, printable
from runs.models import AgentModel, Provider, Tool
from runs.tools.base import shorten

logger = logging.getLogger(__name__)

LOG_MAX_CHARS = 4000


def apply(source: str, raw: bytes, *, prune: bool = False, check: bool = False) -> Work:
    """Bring the catalogue to what the file says; with ``check``, only find out what would change. ``prune`` disables
    the rows that a table of the file does not list. ``source`` names the file in messages.

    Raises CatalogueError. Resolves a host on the network: no transaction may be open.
    """
    work = Work(source, raw, prune)
    if not isinstance(work.data, dict):
        work.wrong((), f"A mapping of {', '.join(TABLES)} is required.")
        work.stop()
    work.wrong((), unknown_fields(work.data, TABLES))
    found = {name: table.read(work.data[name], work) for name, table in TABLES.items() if name in work.data}
    work.stop()
    with transaction.atomic():
        _lock()
        for name, entries in found.items():
            TABLES[name].apply(entries, work)
            work.stop()
        work.warnings = list(dict.fromkeys(_warnings(work.listed, work.disabled)))
        if check:
            transaction.set_rollback(True)
        else:
            transaction.on_commit(catalogue.forget)
    if work.changes and not check:
        summary = "; ".join(change.summary() for change in work.changes)
        logger.info("the catalogue file changed %s", shorten(summary, LOG_MAX_CHARS))
    return work


def _lock() -> None:
    """Two files are applied one after the other. On SQLite, each transaction that writes does that.

    Readers of the tables do not wait. Locked rows would not suffice: a table may have none.
    """
    if connection.vendor == "postgresql":
        names = (model._meta.db_table for model in (Provider, AgentModel, Tool))
        with connection.cursor() as cursor:
            cursor.execute(f"LOCK TABLE {', '.join(names)} IN SHARE ROW EXCLUSIVE MODE")


def _warnings(listed: dict[str, set[str]], disabled: dict[str, set[str]]) -> Iterator[str]:
    """What of the file cannot be used, and who uses what it disables."""
    for row in Provider.objects.filter(name__in=listed["providers"], enabled=True).only("name").order_by("name"):
        if problem := problem_of(row):
            yield f"providers.{row.name} cannot be used yet: {problem}"
    enabled = AgentModel.objects.filter(enabled=True).order_by("name")
    if not enabled.filter(is_default=True, provider__enabled=True).exists():
        yield "No enabled model is the default: runs must name one."
    rows = list(enabled.values_list("name", "provider__name", "provider__enabled", "fallbacks"))
    lost = disabled["models"] | {name for name, provider, *_ in rows if provider in disabled["providers"]}
    for name, provider, offered, _ in rows:
        if not offered and (name in lost or name in listed["models"]):
            yield f"models.{name} cannot be used: its provider {provider} is disabled."
    for name, _, _, fallbacks in rows:
        for fallback in fallbacks:
            if fallback in lost and name not in lost:
                yield f"models.{name} has no fallback {fallback}: it is not offered."
    if settings.RUN_SUMMARY_MODEL in lost:
        yield f"RUN_SUMMARY_MODEL is {settings.RUN_SUMMARY_MODEL}, which is not offered."
    for name, agent in versions.listed().items():
        if agent.model in lost:
            yield f"agents.{name} cannot be used: its model {agent.model} is not offered."
        for tool in agent.tools or ():
            if tool in disabled["tools"]:
                yield f"agents.{name} does not get the tool {tool}, which is disabled."


def export() -> str:
    """The catalogue as a file without secrets. Raises ValueError if a part of it cannot be read."""
    variables = Variables()
    with transaction.atomic():
        written = {name: table.export(variables) for name, table in TABLES.items()}
    comment = ["The catalogue (docs/catalogue.md).", *variables.notes]
    if variables.names:
        comment += ["Secrets are variables of the environment in which the file is applied:"]
        comment += [f"  {name}" for name in variables.names]
    head = "".join(f"# {printable(line)}\n" for line in comment)
    return head + yaml.to_text({name: table for name, table in written.items() if table})


def read_file(path: Path) -> bytes:
    """The file, and one byte more than is allowed at most. Raises ValueError."""
    try:
        with path.open("rb") as file:
            return file.read(settings.CATALOGUE_MAX_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from None
