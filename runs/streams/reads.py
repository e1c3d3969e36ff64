"""What streams read from the database, with few queries for all streams of a process. Every function blocks."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from operator import or_

from django.contrib.auth import get_user_model
from django.db.models import Q

from apikeys.models import ApiKey
from chats.models import Message
from config.kernel import clock
from config.kernel.jsontext import to_text
from runs import events
from runs.models import Run, RunEvent

PAGE_EVENTS = 200
PAGE_CHARS = 64 * 1024
TAIL_EVENTS = 2000
COLUMNS = ("index", "type", "data", "final")


@dataclass(frozen=True, slots=True)
class Event:
    """``data`` is JSON text. The run's last event is ``final``. An event that is not ``numbered`` is sent without its
    index, so the client's position stays unchanged.
    """

    index: int
    type: str
    data: str
    final: bool = False
    numbered: bool = True


def page(run_id: str, after: int) -> list[Event]:
    """The next events of one run: at most PAGE_EVENTS, and about PAGE_CHARS of data; none if the run is deleted."""
    rows = RunEvent.objects.filter(run_id=run_id, index__gt=after).order_by("index")[:PAGE_EVENTS]
    found: list[Event] = []
    size = 0
    for row in rows.values_list(*COLUMNS):
        found.append(Event(*row))
        size += len(found[-1].data)
        if size >= PAGE_CHARS:
            break
    return found or rebuilt(run_id, after)


def existing(run_id: str, after: int, last: int) -> Iterator[Event]:
    """The events that exist now, at least up to ``last``."""
    while after < last and (events := page(run_id, after)):
        yield from events
        after = events[-1].index


def tails(positions: dict[str, int]) -> tuple[list[tuple[str, Event]], bool]:
    """The events of each run after its position, in order, in one query; and whether there may be more."""
    wanted = reduce(or_, (Q(run_id=run_id, index__gt=after) for run_id, after in positions.items()))
    rows = RunEvent.objects.filter(wanted).order_by("run_id", "index").values_list("run_id", *COLUMNS)
    found = [(run_id, Event(*columns)) for run_id, *columns in rows[:TAIL_EVENTS]]
    return found, len(found) == TAIL_EVENTS


def positions(run_ids: list[str]) -> dict[str, int]:
    """The last index of each run's stream; a deleted run is missing."""
    return dict(Run.objects.filter(pk__in=run_ids).values_list("pk", "last_stream_index"))


def live_credentials(user_ids: Iterable[int], key_ids: Iterable[str]) -> tuple[set[int], set[str]]:
    """The users that are active, and the keys that may still read runs."""
    users = get_user_model()._default_manager.filter(pk__in=list(user_ids), is_active=True)
    keys = ApiKey.objects.filter(pk__in=list(key_ids), revoked_at=None, expires_at__gt=clock.now())
    may_read = {key_id for key_id, scopes in keys.values_list("pk", "scopes") if "runs:read" in scopes}
    return set(users.values_list("pk", flat=True)), may_read


def rebuilt(run_id: str, after: int) -> list[Event]:
    """The end of a finished run's stream if its events are pruned, with the last events' indexes and the whole text. A
    client that has a part of the text gets ``message.reset`` first.
    """
    run = Run.objects.filter(pk=run_id).first()
    if run is None or not run.is_over:
        return []
    last = run.last_stream_index
    message = Message.objects.filter(pk=run.assistant_message_id).first() if run.assistant_message_id else None
    found: list[Event] = []
    if message is not None and message.content:
        if after:
            found.append(_event(last - 2, events.message_reset(run), numbered=False))
        found.append(_event(last - 2, events.message_delta(message.content)))
        found.append(_event(last - 1, events.message_completed(run, message.content)))
    kind, data = events.run_status(run)
    found.append(_event(last, (kind, data | {"at": clock.iso(run.finished_at)}), final=True))
    return [event for event in found if event.index > after]


def _event(index: int, happened: events.StreamEvent, *, final: bool = False, numbered: bool = True) -> Event:
    kind, data = happened
    return Event(index, kind, to_text(data), final, numbered)
