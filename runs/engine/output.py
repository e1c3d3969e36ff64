"""The output of a run that has a schema for it: the model gives it as the input of a call of OUTPUT_TOOL, which is
checked like that of any call. Such a call is part of its turn and has no row, approval or price of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from config.kernel.ids import new_id
from runs.engine.session import Session
from runs.llm.base import ToolCall, ToolSpec
from runs.models import OUTPUT_TOOL, Turn
from runs.tools.base import BUILTIN, ToolDefinition, ToolFailure
from runs.tools.schema import check_input, parse_arguments

DESCRIPTION = "Gives your answer: its input is the answer. Call it alone, when no other call is left to make."
NOT_ALONE = "Not accepted beside other calls. Call it alone, when you have their results."


class Answer(NamedTuple):
    """A turn's calls as the turn records them, those that are to be made, and the output if they give one."""

    recorded: list[dict[str, Any]]
    others: list[ToolCall]
    output: dict[str, Any] | None


def spec(schema: Mapping[str, Any]) -> ToolSpec:
    return ToolSpec(OUTPUT_TOOL, DESCRIPTION, dict(schema))


async def read(session: Session, calls: Sequence[ToolCall]) -> Answer:
    """The first call whose input fits gives the output, unless there are calls of tools beside it."""
    schema = session.output_schema
    given = [call for call in calls if call.name == OUTPUT_TOOL] if schema is not None else []
    others = [call for call in calls if call.name != OUTPUT_TOOL or schema is None]
    told: list[str | None] = [NOT_ALONE] * len(given)
    output = None
    if schema is not None and given and not others:
        told, output = await session.process.tool_threads.run(session.run.user_id, _check, schema, given)
    texts = iter(told)
    recorded: list[dict[str, Any]] = [
        {"id": call.id, "name": call.name, "arguments": call.arguments}
        | ({"key": new_id("out"), "told": next(texts)} if call in given else {})
        for call in calls
    ]
    return Answer(recorded, others, output)


def _check(schema: Mapping[str, Any], calls: Sequence[ToolCall]) -> tuple[list[str | None], dict[str, Any] | None]:
    """What the model is told of each call, None of the one that fits, and the input of that one."""
    tool = ToolDefinition(OUTPUT_TOOL, OUTPUT_TOOL, DESCRIPTION, BUILTIN, schema, 0)
    told: list[str | None] = []
    output: dict[str, Any] | None = None
    for call in calls:
        text: str | None = NOT_ALONE
        if output is None:
            try:
                found = parse_arguments(call.arguments)
                check_input(tool, found)
                output, text = found, None
            except ToolFailure as failure:
                text = f"{failure.code}: {failure.message}"
        told.append(text)
    return told, output


def tries(turns: Sequence[Turn]) -> int:
    """How many of the turns were an answer: those without a call of a tool."""
    return sum(all("key" in call for call in turn.tool_calls) for turn in turns)
