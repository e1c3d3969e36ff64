"""What fronts read beside events: where a stream continues, and runs as clients list them. Every function blocks."""

import json
from collections.abc import Collection, Iterator, Sequence, Set
from operator import itemgetter
from typing import Any

from django.db.models import Prefetch

from chats.models import Message
from runs import models, services
from runs.events import SEPARATOR, StreamType, join_text
from runs.fronts.rendering import CLIENT, call_about
from runs.models import RunEvent, ToolInvocation, Turn, Waitpoint, WaitpointKind, WaitpointStatus

# The events that ask a client something, or report an outcome, which a client can have given.
OF_QUESTIONS = (StreamType.WAITPOINT_OPENED, StreamType.TOOL_COMPLETED)


def only_the_client_can_go_on(run_id: str, known: Collection[str], index: int) -> bool:
    """Whether the ``known`` calls are the run's open calls, all await the client, and the last event is ``index``."""
    calls = ToolInvocation.objects.filter(run=run_id).exclude(status__in=models.FINAL_INVOCATION_STATUSES)
    found = {key: state for key, *state in calls.values_list("pk", "awaiting", "run__last_stream_index")}
    return found.keys() == set(known) and all(state == [CLIENT, index] for state in found.values())


def asks_at(run_id: str, last: int) -> int:
    """The index of the event, ``last`` at most, after which the user is asked about the pending waitpoint; 0 if none is
    pending there. The event can be the outcome of another call, which ended after the waitpoint was opened.
    """
    pending = Waitpoint.objects.filter(run=run_id, status=WaitpointStatus.PENDING).first()
    if pending is None or not 0 < index_of(run_id, StreamType.WAITPOINT_OPENED, {pending.pk}) <= last:
        return 0
    events = RunEvent.objects.filter(run=run_id, index__lte=last, type__in=OF_QUESTIONS)
    return events.order_by("-index").values_list("index", flat=True)[0]


def overtaken(run_id: str, after: int, last: int) -> list[range]:
    """The indexes up to ``last`` of text that is void by a reset after ``after``: from the last call to the reset."""
    events = RunEvent.objects.filter(run=run_id, index__lte=last)
    resets = list(events.filter(type=StreamType.MESSAGE_RESET, index__gt=after).values_list("index", flat=True))
    if not resets:
        return []
    steps = sorted(events.filter(type__in=(StreamType.TOOL_STARTED, *OF_QUESTIONS)).values_list("index", flat=True))
    return [range(max((step for step in steps if step < reset), default=0), reset) for reset in resets]


def index_of_stop(run_id: str, answered: Collection[str], shown: Collection[str]) -> int:
    """The index of the event with which a client's stream ended. ``answered``: the ids of the waitpoints and calls that
    the client answers. ``shown``: the ids of the calls in the client's message. The stream ended with the last question
    that the client shows. If it shows none, the stream ended before the first outcome that the client gave in the last
    turn, and before this turn's questions, which another client may have answered. 0 if the events are pruned.
    """
    turn, before = None, 0
    events = RunEvent.objects.filter(run=run_id, type__in=OF_QUESTIONS)
    for index, text in events.order_by("-index").values_list("index", "data").iterator(chunk_size=100):
        data = json.loads(text)
        if data.get("toolInvocationId") in answered and turn in (None, data["turnIndex"]):
            turn, before = data["turnIndex"], index - 1
        elif "id" not in data or (turn is None and data["id"] not in answered):
            continue
        elif turn is None:
            return index
        elif (call := call_about(data["id"])) is None or call.turn != turn:
            return before
        elif (data["id"] if "schema" in data["requestPayload"] else call.id) in shown:
            return index
        else:
            before = index - 1
    return before


def index_of(run_id: str, kind: StreamType, ids: Set[str]) -> int:
    """The index of the last event of this type about one of these waitpoints or calls; 0 if it is pruned."""
    events = RunEvent.objects.filter(run=run_id, type=kind).order_by("-index")
    for index, text in events.values_list("index", "data").iterator(chunk_size=100):
        data = json.loads(text)
        if {data.get("id"), data.get("toolInvocationId")} & ids:
            return index
    return 0


# --- runs as clients list them ----------------------------------------------------------------------------------------


class Recorded:
    """A run with its turns, calls and waitpoints in order."""

    def __init__(self, run: Any) -> None:
        self.run, self.turns, self.calls, self.waitpoints = run, run.all_turns, run.calls, run.all_waitpoints

    def waitpoints_of(self, call: ToolInvocation) -> list[Waitpoint]:
        asked = [(each, each.request_payload.get("toolInvocationId")) for each in self.waitpoints]
        return [each for each, named in asked if call.pk in (each.invocation_id, named)]

    def asked(self, kind: WaitpointKind, key: Any) -> Waitpoint | None:
        """The approval with this id, or the question that is shown as a call with this id."""
        for waitpoint in self.waitpoints:
            is_own_key = kind == WaitpointKind.CREDIT_APPROVAL or is_own(waitpoint)
            if waitpoint.kind == kind and key == (waitpoint.pk if is_own_key else waitpoint.invocation_id):
                return waitpoint
        return None

    def steps(self, content: str, *, asks: bool = False) -> Iterator[tuple[str, list[Any]]]:
        """Each turn that shows something: its text, and its calls in the order in which a stream showed them. With
        ``asks``, the waitpoints that are shown as calls of their own are between the calls. ``content`` is the whole
        message; it can end with the text of an unrecorded turn.
        """
        placed: list[tuple[int, Any, Any]] = [(call.turn_index, self.shown_at(call), call) for call in self.calls]
        own = [waitpoint for waitpoint in self.waitpoints if asks and is_own(waitpoint)]
        placed += [(self._turn_of(waitpoint), waitpoint.created_at, waitpoint) for waitpoint in own]
        placed = sorted(filter(itemgetter(1), placed), key=itemgetter(1))
        texts: list[str] = []
        for index, text in [(0, ""), *((turn.index, turn.text) for turn in self.turns)]:
            texts.append(text)
            if shown := [each for turn, _, each in placed if turn == index]:
                yield join_text(texts), shown
                texts = []
        recorded = join_text(turn.text for turn in self.turns)
        texts.append(content[len(recorded) :].removeprefix(SEPARATOR if recorded else ""))
        if any(texts):
            yield join_text(texts), []

    def _turn_of(self, waitpoint: Waitpoint) -> int:
        """The turn after which the waitpoint is shown; 0 is before the first turn."""
        if waitpoint.invocation_id is not None:
            return next(call.turn_index for call in self.calls if call.pk == waitpoint.invocation_id)
        return max((turn.index for turn in self.turns if turn.finished_at <= waitpoint.created_at), default=0)

    def shown_at(self, call: ToolInvocation) -> Any:
        """When a stream first showed the call; None if no stream has shown it."""
        moments = [*(waitpoint.created_at for waitpoint in self.waitpoints_of(call)), call.started_at, call.finished_at]
        return min(filter(None, moments), default=None)


def is_own(waitpoint: Waitpoint) -> bool:
    """Whether no call can show the waitpoint: it asks for the credits of a turn, or a tool asks it during its call."""
    asked = waitpoint.request_payload
    return "schema" in asked or (waitpoint.invocation_id is None and asked.get("toolInvocationId") is None)


def recorded_of(user: Any, messages: Sequence[Message]) -> dict[str, Recorded]:
    """The runs of the assistant's messages among ``messages``, by id, with a constant number of queries."""
    wanted = [message.run_id for message in messages if message.role == Message.Role.ASSISTANT]
    turns = Turn.objects.only("run_id", "index", "text", "finished_at").order_by("index")
    waitpoints = Prefetch("waitpoints", Waitpoint.objects.order_by("created_at", "pk"), to_attr="all_waitpoints")
    calls = Prefetch("invocations", services.shown_calls(), to_attr="calls")
    read = services.summaries_of(user).filter(pk__in=wanted)
    runs = read.prefetch_related(Prefetch("turns", turns, to_attr="all_turns"), waitpoints, calls)
    return {run.pk: Recorded(run) for run in runs}
