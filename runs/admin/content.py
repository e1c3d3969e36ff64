"""The content of a run: messages, inputs and outputs of turns and tools, questions and answers.

It belongs to the user. No other page of the admin shows it, and ``RunAdmin.content_view`` logs each access.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from chats.models import Message
from config.kernel.jsontext import to_text
from runs.models import Compaction, CompactionKind, ModelAttempt, Run, ToolInvocation, Turn, Waitpoint

ROWS_MAX = 200
TEXT_MAX = 20_000


@dataclass(frozen=True)
class Text:
    label: str
    text: str
    cut: bool = False


@dataclass(frozen=True)
class Part:
    """A step with one panel, or with two: what went in and what came out."""

    title: str
    panels: list[Text]


def read(run: Run) -> list[Part]:
    """The parts in the order of the journal; long texts are cut."""
    messages = list(Message.objects.filter(run_id=run.pk).order_by("created_at", "pk")[:ROWS_MAX])
    parts = [Part(f"Message of the {message.role}", [text("", message.content)]) for message in messages]
    if run.instructions:
        parts.append(Part("Instructions of the run", [text("", run.instructions)]))
    if run.output is not None:
        parts.append(Part("Output", [text("", pretty(run.output))]))
    if run.error_message:
        parts.append(Part("Error", [text("", run.error_message)]))
    journal: list[tuple[tuple[int, int, int], Part]] = []
    calls = list(ToolInvocation.objects.filter(run=run).order_by("turn_index", "call_index")[:ROWS_MAX])
    results: defaultdict[int, list[str]] = defaultdict(list)
    for call in calls:
        results[call.turn_index].append(f"{call.name}: {_result(call)[:TEXT_MAX]}")
    for turn in Turn.objects.filter(run=run).order_by("index")[:ROWS_MAX]:
        sent = results[turn.index - 1] or [m.content for m in messages if m.role == "user" and turn.index == 1]
        answer = [turn.text] if turn.text else []
        asked = [f"{call.get('name')} {call.get('arguments')}" for call in turn.tool_calls]
        refused = [f"Not accepted: {call['told']}" for call in turn.tool_calls if call.get("told")]
        output = text("Output", "\n\n".join([*answer, *asked, *refused]))
        journal.append(
            ((turn.index, 0, 0), Part(f"Turn {turn.index}", [text("New in the input", "\n\n".join(sent)), output]))
        )
    summaries = Compaction.objects.filter(run=run, kind=CompactionKind.SUMMARY).order_by("index")[:ROWS_MAX]
    for compaction in summaries:
        journal.append(
            (
                (compaction.turn_index, -1, 0),
                Part(f"Compaction {compaction.index}: summary", [text("", compaction.text)]),
            )
        )
    attempts = ModelAttempt.objects.filter(run=run).exclude(detail="")
    for attempt in attempts.order_by("turn_index", "compaction", "number")[:ROWS_MAX]:
        title = f"{attempt.step}, attempt {attempt.number}: what the provider said"
        at = (attempt.turn_index, -1 if attempt.compaction else 0, 0)
        journal.append((at, Part(title, [text("", attempt.detail)])))
    for call in calls:
        panels = [text("Input", pretty(call.input)), text("Output", _result(call))]
        title = f"Call {call.turn_index}.{call.call_index} {call.name}"
        journal.append(((call.turn_index, call.call_index, 0), Part(title, panels)))
    for waitpoint in Waitpoint.objects.filter(run=run).select_related("invocation").order_by("pk")[:ROWS_MAX]:
        place = (waitpoint.invocation.turn_index, waitpoint.invocation.call_index)
        panels = [text("Asked", pretty(waitpoint.request_payload)), text("Answer", pretty(waitpoint.resolved_payload))]
        journal.append(((*place, 1), Part(waitpoint.get_kind_display(), panels)))
    return parts + [entry[1] for entry in sorted(journal, key=lambda entry: entry[0])]


def _result(call: ToolInvocation) -> str:
    return "\n".join(filter(None, [call.result, *call.result_urls, call.error_message]))


def text(label: str, content: str) -> Text:
    return Text(label, content[:TEXT_MAX], len(content) > TEXT_MAX)


def pretty(data: Any) -> str:
    return to_text(data, indent=2)
