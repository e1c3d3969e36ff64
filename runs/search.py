"""One page of the runs that match several filters, found in bounded time.

The runs of one filter are in the order of the list in an index; those of several are in none. A search therefore reads
the entries of the rarest filter and checks them against the others. It ends after a number of entries, even if the
page is not full, and the next page continues there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from django.conf import settings
from django.contrib.auth import get_user_model
from django.db.models import OuterRef, QuerySet, Subquery

from config.api.pagination import beyond, stored_forms
from runs.models import Run

# The rarest filter is the one whose entry of this number is the oldest. So many entries are read first, which suffices
# for most pages, then RUN_SEARCH_ENTRIES.
PROBE_ENTRIES = 250


BEFORE_ALL = datetime.min.replace(tzinfo=UTC)


class Place(NamedTuple):
    """A place in the list: after this run, or, without ``key``, before all runs of that time."""

    created_at: datetime
    key: str = ""


@dataclass(frozen=True)
class Entries:
    """The entries of one filter. ``parts`` have none in common, and an index has each in the order of the list. Several
    are read by one statement, so that a run that moves between them meanwhile is found once. ``key`` is the column with
    the run's id.
    """

    parts: Sequence[QuerySet[Any]]
    key: str = "id"

    def after(self, place: Place | None, *columns: Any) -> QuerySet[Any]:
        first, *others = (self._rows(part, place).order_by().values_list(*columns) for part in self.parts)
        order = [f"-{column}" for column in columns if isinstance(column, str)]
        return (first.union(*others, all=True) if others else first).order_by(*order)

    def _rows(self, part: QuerySet[Any], place: Place | None) -> QuerySet[Any]:
        if place is None:
            return part
        if not place.key:
            return part.filter(created_at__lte=stored_forms(place.created_at)[-1])
        return part.filter(beyond(place.created_at, place.key, key_column=self.key))

    def read(self, place: Place | None, matching: QuerySet[Run], size: int) -> list[tuple[datetime, str, bool]]:
        """The next entries: time, id, and whether the run is one of ``matching``."""
        if len(self.parts) == 1:
            entries = self.after(place, "created_at", self.key, _match(matching, self.key))
            return [(created_at, key, found is not None) for created_at, key, found in entries[:size]]
        # Not in the same statement: PostgreSQL would match all entries before it takes the first ones.
        keys = list(self.after(place, "created_at", self.key)[:size])
        runs = Run.objects.filter(pk__in=[key for _, key in keys]).order_by()
        found = set(runs.values_list(_match(matching, "pk"), flat=True))
        return [(created_at, key, key in found) for created_at, key in keys]


class Found(NamedTuple):
    """Runs from the newest on, and where the search ended; None if there are no others."""

    runs: list[Place]
    end: Place | None


def _match(matching: QuerySet[Run], key: str) -> Subquery:
    """A scalar subquery of each run: with a join, the database may begin with the runs of a common filter."""
    return Subquery(matching.filter(pk=OuterRef(key)).order_by().values("pk"))


def find(
    user_id: int, filters: Sequence[Entries], matching: QuerySet[Run], place: Place | None, count: int, share: int = 1
) -> Found:
    """At most ``count`` runs of ``matching`` after ``place``. It must match no run that one of ``filters`` lacks.
    ``share``: it reads at most that part, one of ``share``, of the entries that a page may read.
    """
    found: list[Place] = []
    for step in (PROBE_ENTRIES, settings.RUN_SEARCH_ENTRIES):
        source = filters[0]
        if len(filters) > 1:
            newest, depths = _probe(user_id, filters, place)
            if None in newest:
                return Found(found, None)
            # No filter's entry is newer than this: what the others have before it is skipped.
            place = min(filter(None, (place, *map(Place, newest))), key=lambda each: each.created_at)
            source = filters[depths.index(min(depths))]
        size = max(step // share, count)
        entries = source.read(place, matching, size)
        for created_at, key, matches in entries:
            place = Place(created_at, key)
            if matches:
                found.append(place)
                if len(found) == count:
                    return Found(found, place)
        if len(entries) < size:
            return Found(found, None)
    return Found(found, place)


def _probe(user_id: int, filters: Sequence[Entries], place: Place | None) -> tuple[list[Any], list[datetime]]:
    """The times of each filter's newest entry, and of its entry number PROBE_ENTRIES; the first may be None."""
    parts: dict[str, Subquery] = {}
    for number, each in enumerate(filters):
        times = each.after(place, "created_at")
        parts[f"newest_{number}"] = Subquery(times[:1])
        parts[f"deep_{number}"] = Subquery(times[PROBE_ENTRIES - 1 : PROBE_ENTRIES])
    times = get_user_model().objects.filter(pk=user_id).values_list(*parts.values()).get()
    return list(times[::2]), [time or BEFORE_ALL for time in times[1::2]]


def merged(parts: Sequence[Found], limit: int) -> Found:
    """The page of several searches, each run once. What one of them has beyond the end of another may not be next: it
    is left out.
    """
    ends = [part.end for part in parts if part.end is not None]
    end = max(ends, default=None)
    runs = sorted({run for part in parts for run in part.runs if end is None or run >= end}, reverse=True)
    if len(runs) > limit:
        return Found(runs[:limit], runs[limit - 1])
    return Found(runs, end)
