"""The content of a run: messages, inputs and results of tools, questions and answers.

It belongs to the user. No other page of the admin shows it, and ``RunAdmin.content_view`` logs each access.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from chats.models import Message
from runs.models import Run, ToolInvocation, Turn, Waitpoint

ROWS_MAX = 200
TEXT_MAX = 20_000


@dataclass(frozen=True)
class Part:
    title: str
    text: str
    cut: bool = False


def read(run: Run) -> list[Part]:
    """The parts in the order of the journal; long texts are cut."""
    parts = [
        part(f"Message of the {message.role}", message.content)
        for message in Message.objects.filter(run_id=run.pk).order_by("created_at", "pk")[:ROWS_MAX]
    ]
    if run.error_message:
        parts.append(part("Error", run.error_message))
    journal: list[tuple[tuple[int, int, int], Part]] = []
    for turn in Turn.objects.filter(run=run).order_by("index")[:ROWS_MAX]:
        if turn.text:
            journal.append(((turn.index, 0, 0), part(f"Turn {turn.index}: text", turn.text)))
    for call in ToolInvocation.objects.filter(run=run).order_by("turn_index", "call_index")[:ROWS_MAX]:
        place, name = (call.turn_index, call.call_index), f"Call {call.turn_index}.{call.call_index} {call.name}"
        journal.append(((*place, 0), part(f"{name}: input", pretty(call.input))))
        if call.result or call.result_urls:
            text = "\n".join([call.result, *call.result_urls])
            journal.append(((*place, 2), part(f"{name}: result", text)))
        if call.error_message:
            journal.append(((*place, 2), part(f"{name}: error", call.error_message)))
    for waitpoint in Waitpoint.objects.filter(run=run).select_related("invocation").order_by("pk")[:ROWS_MAX]:
        place = (waitpoint.invocation.turn_index, waitpoint.invocation.call_index)
        asked = {"asked": waitpoint.request_payload, "answered": waitpoint.resolved_payload}
        journal.append(((*place, 1), part(f"{waitpoint.kind}", pretty(asked))))
    return parts + [entry[1] for entry in sorted(journal, key=lambda entry: entry[0])]


def part(title: str, text: str) -> Part:
    return Part(title, text[:TEXT_MAX], len(text) > TEXT_MAX)


def pretty(data: Any) -> str:
    return json.dumps(data, ensure_ascii=False, indent=2, default=str)
