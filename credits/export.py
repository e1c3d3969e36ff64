"""The ledger as CSV, produced row by row during the response."""

import csv
from collections.abc import Iterable, Iterator
from typing import Any

from config.api.negotiation import ExactJSONRenderer
from credits.grants import Balances
from credits.models import LedgerEntry
from credits.serializers import LedgerEntrySerializer

FREE_TEXT = {"toolKey", "reason", "reference"}
# A spreadsheet would execute text that begins like a formula. Some also accept the full-width signs.
FORMULA_SIGNS = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")


def no_formula(text: str) -> str:
    return f"'{text}" if text.startswith(FORMULA_SIGNS) else text


class CsvRenderer(ExactJSONRenderer):
    """Makes ``Accept: text/csv`` negotiable. The view streams the rows itself; errors remain JSON."""

    media_type = "text/csv"
    format = "csv"


class _Line:
    """A file for csv.writer that returns each line instead of storing it."""

    def write(self, line: str) -> str:
        return line


def csv_lines(entries: Iterable[LedgerEntry]) -> Iterator[str]:
    # One serializer for all rows: a new one for each row would take most of the time, and keep the row in memory.
    writer, serializer, balances = csv.writer(_Line()), LedgerEntrySerializer(), Balances()
    yield writer.writerow(serializer.fields)
    for entry in entries:
        yield writer.writerow([_cell(*item) for item in serializer.to_representation(balances.give(entry)).items()])


def _cell(column: str, value: Any) -> str:
    if value is None:
        return ""
    return no_formula(value) if column in FREE_TEXT else value
