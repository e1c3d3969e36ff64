"""The ledger as CSV, produced in parts during the response."""

import csv
from collections.abc import Iterable, Iterator
from io import StringIO
from typing import Any

from config.api.negotiation import ExactJSONRenderer
from credits.grants import Balances
from credits.models import LedgerEntry
from credits.serializers import LedgerEntrySerializer

# Rows of a part. Each part takes a change of threads, and other requests wait while one is made.
ROWS_AT_ONCE = 25
FREE_TEXT = {"toolKey", "reason", "reference"}
# A spreadsheet would execute text that begins like a formula. Some also accept the full-width signs.
FORMULA_SIGNS = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")


def no_formula(text: str) -> str:
    return f"'{text}" if text.startswith(FORMULA_SIGNS) else text


class CsvRenderer(ExactJSONRenderer):
    """Makes ``Accept: text/csv`` negotiable. The view streams the rows itself; errors remain JSON."""

    media_type = "text/csv"
    format = "csv"


def csv_parts(entries: Iterable[LedgerEntry]) -> Iterator[str]:
    # One serializer for all rows: a new one for each row would take most of the time, and keep the row in memory.
    text, serializer, balances = StringIO(), LedgerEntrySerializer(), Balances()
    writer = csv.writer(text)
    writer.writerow(serializer.fields)
    for number, entry in enumerate(entries, 1):
        writer.writerow([_cell(*item) for item in serializer.to_representation(balances.give(entry)).items()])
        if not number % ROWS_AT_ONCE:
            yield text.getvalue()
            text.seek(0)
            text.truncate()
    if rest := text.getvalue():
        yield rest


def _cell(column: str, value: Any) -> str:
    if value is None:
        return ""
    return no_formula(value) if column in FREE_TEXT else value
