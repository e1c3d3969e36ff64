"""The content of a run, which belongs to the user: no other page of the admin shows it, and ``RunAdmin.content`` logs
each access.
"""

from collections import defaultdict
from typing import Any

from chats.models import Message
from config.kernel.jsontext import to_text
from runs.models import Compaction, CompactionKind, ModelAttempt, Run, ToolInvocation, Turn, Waitpoint

ROWS_MAX = 200
TEXT_MAX = 20_000
# The title of a step, and its panels, one or two (what went in and what came out): label, text, whether it was cut.
Part = tuple[str, list[tuple[str, str, bool]]]


def read(run: Run) -> list[Part]:
    """The parts in the order of the journal; long texts are cut."""
    messages = Message.objects.filter(run_id=run.pk).order_by("created_at", "pk")[:ROWS_MAX]
    parts = [part(f"Message of the {message.role}", message.content) for message in messages]
    output = None if run.output is None else pretty(run.output)
    whole = ("Instructions of the run", run.instructions), ("Output", output), ("Error", run.error_message)
    parts += [part(title, text) for title, text in whole if text]
    # By turn, call and, of one call, what came first.
    journal: list[tuple[tuple[int, int, int], Part]] = []
    results: defaultdict[int, list[str]] = defaultdict(list)
    for call in ToolInvocation.objects.filter(run=run).order_by("turn_index", "call_index")[:ROWS_MAX]:
        said = (call.progress or {}).get("message")
        result = "\n".join(filter(None, [said, call.result, *call.result_urls, call.error_message]))
        results[call.turn_index].append(f"{call.name}: {result[:TEXT_MAX]}")
        shown = part(f"Call {call.turn_index}.{call.call_index} {call.name}", Input=pretty(call.input), Output=result)
        journal.append(((call.turn_index, call.call_index, 0), shown))
    asked = [message.content for message in messages if message.role == "user"]
    for turn in Turn.objects.filter(run=run).order_by("index")[:ROWS_MAX]:
        sent = results[turn.index - 1] or (asked if turn.index == 1 else [])
        answer = [turn.text] if turn.text else []
        answer += [f"{call.get('name')} {call.get('arguments')}" for call in turn.tool_calls]
        answer += [f"Not accepted: {call['told']}" for call in turn.tool_calls if call.get("told")]
        both = {"New in the input": "\n\n".join(sent), "Output": "\n\n".join(answer)}
        journal.append(((turn.index, 0, 0), part(f"Turn {turn.index}", **both)))
    for step in Compaction.objects.filter(run=run, kind=CompactionKind.SUMMARY).order_by("index")[:ROWS_MAX]:
        journal.append(((step.turn_index, -1, 0), part(f"Compaction {step.index}: summary", step.text)))
    attempts = ModelAttempt.objects.filter(run=run).exclude(detail="")
    for attempt in attempts.order_by("turn_index", "compaction", "number")[:ROWS_MAX]:
        title = f"{attempt.step}, attempt {attempt.number}: what the provider said"
        journal.append(((attempt.turn_index, -1 if attempt.compaction else 0, 0), part(title, attempt.detail)))
    for point in Waitpoint.objects.filter(run=run).select_related("invocation").order_by("pk")[:ROWS_MAX]:
        both = {"Asked": pretty(point.request_payload), "Answer": pretty(point.resolved_payload)}
        about = point.invocation
        place = (about.turn_index, about.call_index, 1) if about else (run.turn_count + 1, 0, 0)
        journal.append((place, part(point.get_kind_display(), **both)))
    return parts + [found for _, found in sorted(journal, key=lambda entry: entry[0])]


def part(title: str, text: str | None = None, **texts: str) -> Part:
    """With one ``text``, or with one for each label."""
    found = texts if text is None else {"": text}
    return title, [(label, text[:TEXT_MAX], len(text) > TEXT_MAX) for label, text in found.items()]


def pretty(data: Any) -> str:
    return to_text(data, indent=2)
