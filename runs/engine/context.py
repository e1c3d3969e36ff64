"""What a run's next turn is given: the request for the model, and how much of the window it takes."""

from __future__ import annotations

from django.conf import settings

from runs.catalogue.definitions import ModelDefinition
from runs.engine import output
from runs.engine.budget import Plan, output_limit
from runs.engine.history import Report
from runs.engine.session import Session
from runs.engine.transcript import messages
from runs.llm.base import ModelRequest, ToolSpec
from runs.llm.measure import fixed_bytes


def plan(session: Session, model: ModelDefinition) -> Plan:
    """The transcript of the run's next request to a model."""
    return Plan(
        model=model,
        run_id=session.run.id,
        history=session.history,
        turns=session.parts(),
        fixed=fixed_bytes(session.instructions, _tools(session)),
        report=_report(session, model.origin),
    )


def request(session: Session, plan: Plan) -> ModelRequest:
    """The request for the run's next turn."""
    model, history = plan.model, plan.history
    return ModelRequest(
        model=model,
        messages=tuple(messages(plan.cut, history.runs, plan.run_id, history.message, plan.turns)),
        tools=_tools(session),
        run_id=session.run.id,
        chat_id=session.run.chat_id,
        turn_index=len(session.journal.turns) + 1,
        max_output_tokens=_output_tokens(plan),
        instructions=session.instructions,
        failed_attempts=len(session.journal.failed_attempts),
    )


def _tools(session: Session) -> tuple[ToolSpec, ...]:
    """What the model may call: the run's tools, and last the tool for its output."""
    tools = [
        ToolSpec(tool.name, tool.description, dict(tool.input_schema)) for _, tool in sorted(session.tools().items())
    ]
    return (*tools, output.spec(session.output_schema)) if session.output_schema is not None else tuple(tools)


def _output_tokens(plan: Plan) -> int:
    """The output limit: less than the model's for a request that leaves no room for it."""
    limit = output_limit(plan.model)
    left = plan.model.context_tokens - plan.now
    return max(min(limit, left), min(limit, settings.MODEL_MIN_OUTPUT_TOKENS))


def _report(session: Session, origin: str) -> Report | None:
    """What the model's provider counted last, in this run or in an earlier one of the chat."""
    for turn in reversed(session.journal.turns):
        if turn.origin == origin and not turn.estimated and turn.input_tokens and turn.context_bytes:
            return Report(origin, turn.input_tokens, turn.context_bytes)
    return next((report for report in session.history.reports if report.origin == origin), None)
