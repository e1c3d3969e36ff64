"""``export``: all that is kept of a person, as lines of JSON."""

import base64
import json
from collections.abc import Iterator
from typing import Any

from django.core.files.storage import default_storage
from django.db.models import Model, QuerySet

from chats import files
from config.kernel.jsontext import to_text
from runs.privacy import tables
from runs.privacy.tables import TABLES, Report
from runs.tools import files as tool_files

# Rows that are read together. A run has many events.
BATCH = 50
PART_BYTES = 1024 * 1024
# Where the files of a row are, in a folder of its id.
FOLDERS = {"chats.Attachment": files.FOLDER, "runs.ToolInvocation": tool_files.FOLDER}


def export(user: Any, report: Report | None = None) -> Iterator[str]:
    """Lines ``{"table": …, "row": {…}}``, and for each file ``{"file": …, "offset": …, "base64": …}`` parts. A row is
    followed by the rows that belong to it. Secrets are left out.
    """
    for label, table in TABLES.items():
        if table.erasure not in tables.WITHOUT_ROWS and not any(tables.reference(label)):
            yield from _lines(label, tables.rows_of(label, user), report)
    for rows in tables.of_installation(user, report):
        yield from _lines("webhooks.Delivery", rows)


def _lines(label: str, rows: QuerySet[Any], report: Report | None = None) -> Iterator[str]:
    table, model = TABLES[label], tables.model_of(label)
    keys = list(rows.order_by("pk").values_list("pk", flat=True))
    for start in range(0, len(keys), BATCH):
        batch = keys[start : start + BATCH]
        for row in model._base_manager.filter(pk__in=batch).defer(*table.hidden).order_by("pk"):
            yield _line(row, table.hidden)
            for name in files.in_folder(f"{FOLDERS[label]}/{row.pk}") if label in FOLDERS else ():
                yield from _parts(name)
        for child in TABLES:
            field, parent = tables.reference(child)
            if parent == label:
                its_rows = tables.model_of(child)._base_manager.filter(**{f"{field}__in": batch})
                # The rows of a chat or a run are not counted in the report.
                yield from _lines(child, its_rows, report if label == tables.USER else None)
        if report is not None:
            report(str(model._meta.verbose_name_plural), start + len(batch), len(keys))


def _line(row: Model, hidden: frozenset[str]) -> str:
    fields = [field for field in row._meta.concrete_fields if field.name not in hidden]
    values = {field.attname: getattr(row, field.attname) for field in fields}
    for name, value in values.items():
        if isinstance(value, bytes | memoryview):
            values[name] = bytes(value).decode("utf-8", "replace")
    return to_text({"table": row._meta.db_table, "row": values})


def _parts(name: str) -> Iterator[str]:
    offset = 0
    with files.storage_errors(), default_storage.open(name) as file:
        while part := file.read(PART_BYTES):
            yield json.dumps({"file": name, "offset": offset, "base64": base64.b64encode(part).decode()})
            offset += len(part)
