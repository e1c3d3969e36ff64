"""What PostgreSQL reads for the queries of a block, by its own count."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from django.db import connection


@dataclass
class Plans:
    """The plans of the queries that read the table, in their order."""

    texts: list[str] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """The rows that all steps read, with those that they drop."""
        steps = re.findall(
            r"actual rows=(\d+) loops=(\d+)|Rows Removed by (?:Index Recheck|Filter): (\d+)", "\n".join(self.texts)
        )
        return sum(int(rows or dropped) * int(loops or 1) for rows, loops, dropped in steps)


@contextmanager
def plans_of(table: str) -> Iterator[Plans]:
    """The plans of what the block reads from the table. Only an index can answer the queries, as if the table were
    large. Needs a transaction.
    """
    plans = Plans()

    def explain(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if sql.lstrip().startswith(("SELECT", "WITH")) and table in sql:
            with connection.connection.cursor() as plain:
                plain.execute("EXPLAIN (ANALYZE, TIMING OFF) " + sql, params)
                plans.texts.append("\n".join(row[0] for row in plain.fetchall()))
        return execute(sql, params, many, context)

    with connection.cursor() as cursor:
        cursor.execute(f"ANALYZE {table}")
        cursor.execute("SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off")
    with connection.execute_wrapper(explain):
        yield plans
