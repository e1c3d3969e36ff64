"""What fronts read from the database beside events. Every function blocks; nothing here writes."""

from __future__ import annotations

import json
from collections.abc import Collection

from config.kernel import money
from credits import sums
from runs.events import StreamType
from runs.fronts.rendering import CLIENT, Call, Facts, overtaken_by
from runs.models import FINAL_INVOCATION_STATUSES, Run, RunEvent, ToolInvocation, Waitpoint, WaitpointStatus
from runs.serializers import UsageSerializer
from runs.streams.reads import Event
from runs.tools.base import ASK_USER

# The events by which a turn has calls.
OF_CALLS = (StreamType.TOOL_STARTED, StreamType.TOOL_COMPLETED, StreamType.WAITPOINT_OPENED)
# Of these, a client is asked what is open, or gives the outcome.
OF_QUESTIONS = (StreamType.WAITPOINT_OPENED, StreamType.TOOL_COMPLETED)


def facts_of(run_id: str, event: Event) -> Facts:
    """What ``Rendering.feed`` needs to know beside the event."""
    if event.type == StreamType.WAITPOINT_OPENED:
        return Facts(call=_call_of(json.loads(event.data)["id"]))
    run = Run.objects.filter(pk=run_id)
    if not event.final:
        return Facts(run.values_list("assistant_message_id", flat=True).first())
    ended = run.annotate(credits_spent=sums.run_spent_subquery()).first()
    if ended is None:
        return Facts()
    return Facts(
        message_id=ended.assistant_message_id,
        finish_reason=ended.finish_reason,
        credits_used=money.to_number(ended.credits_spent),
        usage=UsageSerializer(ended).data,
        output=ended.output,
    )


def _call_of(waitpoint_id: str) -> Call | None:
    """The call that the waitpoint is about; None if it is about a turn, or deleted."""
    waitpoint = Waitpoint.objects.filter(pk=waitpoint_id).select_related("invocation").first()
    if waitpoint is None:
        return None
    call = waitpoint.invocation
    if call is None and (named := waitpoint.request_payload.get("toolInvocationId")):
        call = ToolInvocation.objects.filter(pk=named).first()
    if call is None:
        return None
    awaiting = CLIENT if call.name == ASK_USER or call.node_type == CLIENT else None
    return Call(call.pk, call.name, call.turn_index, call.input, awaiting)


def only_the_client_can_go_on(run_id: str, known: Collection[str]) -> bool:
    """Whether the ``known`` calls are the open ones of the run, and all await the client. The run may be further on
    than its stream.
    """
    calls = ToolInvocation.objects.filter(run=run_id).exclude(status__in=FINAL_INVOCATION_STATUSES)
    awaiting = dict(calls.values_list("pk", "awaiting"))
    return awaiting.keys() == set(known) and set(awaiting.values()) == {CLIENT}


def asks_at(run_id: str, last: int) -> int:
    """The index up to ``last`` after which the user is asked what the run waits for; 0 if nothing is asked there. Calls
    beside the waitpoint may have ended since it was opened.
    """
    pending = Waitpoint.objects.filter(run=run_id, status=WaitpointStatus.PENDING).first()
    if pending is None or not 0 < index_of_question(pending) <= last:
        return 0
    events = RunEvent.objects.filter(run=run_id, index__lte=last, type__in=OF_QUESTIONS)
    return events.order_by("-index").values_list("index", flat=True)[0]


def overtaken(run_id: str, after: int, last: int) -> list[range]:
    """The indexes of text up to ``last`` that a reset after ``after`` makes void."""
    events = RunEvent.objects.filter(run=run_id, index__lte=last)
    resets = list(events.filter(type=StreamType.MESSAGE_RESET, index__gt=after).values_list("index", flat=True))
    if not resets:
        return []
    return overtaken_by(resets, events.filter(type__in=OF_CALLS).values_list("index", flat=True))


def index_of_stop(run_id: str, answered: Collection[str]) -> int:
    """The index at which the stream of a client ended that gave these answers to waitpoints and calls: that of the last
    question, or the one before the first outcome that it gave to calls of the last turn. 0 if the events are pruned.
    """
    turn, before = None, 0
    events = RunEvent.objects.filter(run=run_id, type__in=OF_QUESTIONS)
    for index, text in events.order_by("-index").values_list("index", "data").iterator(chunk_size=100):
        data = json.loads(text)
        if data.get("id") in answered:
            return max(index, before)
        if data.get("toolInvocationId") in answered and turn in (None, data["turnIndex"]):
            turn, before = data["turnIndex"], index - 1
    return before


def index_of_results(run_id: str, answered: Collection[str]) -> int:
    """The index of the last outcome of these calls; 0 if the run's events are pruned."""
    events = RunEvent.objects.filter(run=run_id, type=StreamType.TOOL_COMPLETED).order_by("-index")
    found = events.values_list("index", "data").iterator(chunk_size=100)
    return next((index for index, data in found if json.loads(data)["toolInvocationId"] in answered), 0)


def index_of_question(waitpoint: Waitpoint) -> int:
    """The index of the event by which the waitpoint was opened; 0 if it is pruned."""
    opened = RunEvent.objects.filter(run=waitpoint.run_id, type=StreamType.WAITPOINT_OPENED)
    return opened.filter(data__contains=waitpoint.pk).values_list("index", flat=True).first() or 0
