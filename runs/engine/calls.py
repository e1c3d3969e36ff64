"""The tool calls of one run: their checks, questions to the user, dispatch, execution and recorded outcomes."""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from django.conf import settings

from config.kernel import clock, money
from config.kernel.ids import new_id
from config.limits.share import Held
from runs import lifecycle
from runs.engine.requests import Exhausted
from runs.engine.session import Session
from runs.errors import CallError
from runs.llm.base import ToolCall
from runs.models import InvocationStatus, Run, Tool, ToolInvocation, WaitpointKind
from runs.tools.base import ASK_USER, BUILTIN, CLIENT, MCP, Outcome, Parked, ToolDefinition, ToolFailure, ToolResult
from runs.tools.dispatch import TYPES, call_tool
from runs.tools.http import callback_url
from runs.tools.questions import Dialogue
from runs.tools.schema import check_input, parse_arguments


async def new_invocations(session: Session, turn_index: int, calls: list[ToolCall]) -> list[ToolInvocation]:
    """New invocations, not stored yet. Those that name no known tool, or whose input is not valid, are FAILED."""
    await session.learn_tools(call.name for call in calls)
    offered = session.tools()
    threads, now = session.process.tool_threads, clock.now()
    parsed = await threads.run(session.run.user_id, lambda: [_parse(call, offered.get(call.name)) for call in calls])
    new: list[ToolInvocation] = []
    for index, (call, (input, failure)) in enumerate(zip(calls, parsed, strict=True), 1):
        tool = offered.get(call.name)
        invocation = ToolInvocation(
            id=new_id("inv"),
            run=session.run,
            turn_index=turn_index,
            call_index=index,
            tool_call_id=call.id,
            name=call.name,
            node_type=tool.node_type if tool else BUILTIN,
            input=input,
            credit_estimate=tool.price if tool else 0,
            repeatable=tool.repeatable if tool else False,
            park_seconds=tool.park_seconds if tool else None,
            created_at=now,
            updated_at=now,
        )
        new.append(lifecycle.reject_new_call(invocation, failure) if failure else invocation)
    return new


def _parse(call: ToolCall, tool: ToolDefinition | None) -> tuple[dict[str, Any], ToolFailure | None]:
    """The arguments, {} if they are no JSON object; and why the call fails, or None."""
    failure = None if tool else ToolFailure(CallError.UNKNOWN_TOOL, f"There is no tool named {call.name}.")
    input: dict[str, Any] = {}
    try:
        input = parse_arguments(call.arguments)
        if tool is not None:
            check_input(tool, input)
    except ToolFailure as invalid:
        failure = failure or invalid
    return input, failure


def needs_no_approval(session: Session, calls: list[ToolInvocation]) -> list[ToolInvocation]:
    """The PENDING calls that can be made without an answer of the user."""
    return [call for call in calls if call.status == InvocationStatus.PENDING and _question(session, call) is None]


def _question(session: Session, call: ToolInvocation) -> tuple[str, dict[str, Any]] | None:
    """What the user must answer first: (waitpoint kind, its request payload), or None. An approval comes first."""
    if call.status == InvocationStatus.DISPATCHING:
        if (asked := _dialogue(call).question) is None:
            return None
        payload = {"question": asked.text, "toolInvocationId": call.id, "schema": asked.schema}
        return WaitpointKind.CLARIFICATION, payload
    tool, threshold = session.tools().get(call.name), session.run.credit_approval_threshold
    if threshold is None:
        threshold = money.parse(settings.CREDIT_APPROVAL_THRESHOLD)
    when = None if tool is None or tool.node_type == CLIENT else tool.approval
    is_over = when == Tool.Approval.THRESHOLD and call.credit_estimate > threshold
    if (is_over or when == Tool.Approval.ALWAYS) and not _is_approved(session, call):
        payload = {"toolName": call.name, "toolInvocationId": call.id, "input": call.input}
        amounts = {"estimatedMicro": call.credit_estimate, "thresholdMicro": threshold}
        return WaitpointKind.CREDIT_APPROVAL, payload | amounts
    if call.name == ASK_USER and (call.id, WaitpointKind.CLARIFICATION) not in session.journal.answers:
        payload = {name: call.input[name] for name in ("question", "options") if name in call.input}
        return WaitpointKind.CLARIFICATION, payload
    return None


def _dialogue(call: ToolInvocation) -> Dialogue:
    """The questions of the server of the call's tool; only servers of MCP tools ask any."""
    return Dialogue.from_text(call.remote_task if call.node_type == MCP else "")


def _is_approved(session: Session, call: ToolInvocation) -> bool:
    """Whether the user approved the PENDING call. It has its hold since then, unless other steps held the credits."""
    return (call.id, WaitpointKind.CREDIT_APPROVAL) in session.journal.answers


async def resume(session: Session) -> None:
    """Make the open calls that need no answer of the user. If there are none, ask one question, for which the run then
    waits. If there is no question either, all open calls await outcomes from outside: the run is parked.
    """
    open_calls = session.journal.open_calls
    # First of all, because a call of an unknown tool would need no approval.
    await session.learn_tools(call.name for call in open_calls)
    questions = {call.id: (call, asked) for call in open_calls if (asked := _question(session, call))}
    free = [call for call in open_calls if call.id not in questions and not call.awaiting]
    if not (free or questions):
        lifecycle.crash_point("before_park_run")
        await session.step(lifecycle.park_run)
        return
    if not free:
        await _ask(session, *next(iter(questions.values())))
        return
    # A call that this process dispatched has an outcome by now, unless the loop was interrupted before it was recorded.
    orphans = [call for call in free if call.status == InvocationStatus.DISPATCHING]
    ready = [call for call in free if call.status == InvocationStatus.PENDING]
    lifecycle.crash_point("before_dispatch")
    begun = [call for orphan in orphans if (call := await _begin(session, orphan)) is not None]
    with Held(session.process.tool_places, session.run.user_id) as held:
        await _dispatch(session, take_places(held, ready))
        await execute(session, held, [*begun, *ready])


async def _dispatch(session: Session, calls: Sequence[ToolInvocation]) -> Sequence[ToolInvocation]:
    approved = {call.id for call in calls if _is_approved(session, call)}
    return await session.step(lifecycle.dispatch_calls, calls, approved) if calls else ()


async def _begin(session: Session, call: ToolInvocation) -> ToolInvocation | None:
    """A dispatched call as it is to be made now: by this worker for the first time, or again with the same id. None if
    it must not be made: its worker was lost, and the outcome is unknown or comes from the tool.
    """
    if (dialogue := _dialogue(call)).is_answered:
        (begun,) = await session.step(lifecycle.keep_dialogue, call, replace(dialogue, begun=True).to_text())
        return begun
    if call.id not in session.uncertain or (call.repeatable and call.name in session.tools()):
        return call
    # The outcome of an MCP server's task cannot be asked for without its id, which may be lost with the worker.
    if call.park_seconds is not None and call.node_type != MCP:
        await session.step(lifecycle.park_call, call, Parked())
        return None
    message = "The worker was lost while the tool was at work; whether it took effect is not known."
    await session.step(lifecycle.record_call_result, call, ToolFailure(CallError.OUTCOME_UNKNOWN, message))
    return None


async def _ask(session: Session, call: ToolInvocation, question: tuple[str, dict[str, Any]]) -> None:
    over = None
    # The budget already counts the hold of an approved or dispatched call.
    if call.status == InvocationStatus.PENDING and not _is_approved(session, call):
        over = await session.db(lifecycle.refusal, call.credit_estimate, of_credits=False)
    if over and session.run.waits_for_credits:
        raise Exhausted(over, call)
    if over:
        await session.step(lifecycle.record_call_result, call, ToolFailure(over.code, over.message))
        return
    lifecycle.crash_point("before_wait")
    await session.step(lifecycle.open_waitpoint, call, *question, question=_dialogue(call).answered)


def take_places(held: Held, ready: Sequence[ToolInvocation]) -> list[ToolInvocation]:
    """The calls that need no place, or get one now."""
    return [call for call in ready if _needs_no_place(call) or held.take_now(call.id)]


def _needs_no_place(call: ToolInvocation) -> bool:
    return call.name == ASK_USER or call.node_type == CLIENT


async def execute(session: Session, held: Held, calls: Sequence[ToolInvocation]) -> None:
    """Make the calls side by side, and record their outcomes. PENDING calls wait for a place, and for credits that
    other steps hold. If the process drains meanwhile, they stay PENDING: another process makes them.
    """
    now = {call.id: call for call in session.journal.calls}
    work = [now[call.id] for call in calls]
    for call in work:
        if call.status != InvocationStatus.DISPATCHING:
            held.give_back(call.id)
    made = [_make(session, call, held) for call in work if call.is_open and not call.awaiting]
    # All calls end before the first failure is raised: an outcome of a call that was made must be recorded.
    for outcome in await asyncio.gather(*made, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome


async def _make(session: Session, call: ToolInvocation, held: Held) -> None:
    """Make a call when it has a place, which it gives back while it waits for credits. Raises Exhausted."""
    outcome: Outcome | ToolFailure
    while True:
        async with contextlib.nullcontext() if _needs_no_place(call) else held.place(call.id):
            if call.status == InvocationStatus.PENDING:
                if session.process.draining:
                    return
                (call,) = await _dispatch(session, [call])
            if call.status == InvocationStatus.DISPATCHING and not call.awaiting:
                lifecycle.crash_point("after_dispatch")
                try:
                    outcome = await _call(session, call)
                except ToolFailure as failure:
                    outcome = failure
                break
        if call.status != InvocationStatus.PENDING:
            return
        await session.wait_for_credits(call.credit_estimate)
        if session.run.waits_for_credits and (refusal := await session.db(lifecycle.refusal, call.credit_estimate)):
            raise Exhausted(refusal, call)
    lifecycle.crash_point("after_tool")
    await _record(session, call, outcome)


async def _record(session: Session, call: ToolInvocation, outcome: Outcome | ToolFailure) -> None:
    """Record a call's outcome. If the session is behind (a lost reply, another outcome), read the run and retry."""
    recording: tuple[Any, ...] = lifecycle.record_call_result, call, outcome
    if isinstance(outcome, Parked):
        recording = lifecycle.park_call, call, outcome
        if outcome.asks_user:
            recording = lifecycle.keep_dialogue, call, outcome.remote_task
    while True:
        try:
            await session.step(*recording)
            return
        except lifecycle.LeaseLost:
            if not await session.reload():
                raise
        if call.id not in [still_open.id for still_open in session.journal.open_calls if not still_open.awaiting]:
            return  # its own commit succeeded, or its tool has called back


async def _call(session: Session, call: ToolInvocation) -> Outcome:
    """Raises ToolFailure."""
    if call.name == ASK_USER:
        given: Any = session.journal.answers[call.id, WaitpointKind.CLARIFICATION].resolved_payload
        return ToolResult(given["answer"])
    tool = session.tools().get(call.name)
    if tool is None:
        raise ToolFailure(CallError.UNKNOWN_TOOL, f"There is no tool named {call.name} any more.")
    await session.confirm_lease()  # the lease may have ended during the wait for the place
    session.uncertain.add(call.id)
    names = Run.objects.values_list("user__username", flat=True)
    signs = bool(tool.signing_secret) and not tool.unsigned_callbacks
    context = session.process.tool_context(
        session.run,
        call,
        user_name=await session.db(lambda run: names.get(pk=run.pk)) if TYPES[tool.node_type].needs_url else "",
        timeout_seconds=max(0.1, session.remaining_seconds()),
        callback_url=callback_url(call.id, signed=signs) if call.park_seconds else "",
        park_until=call.latest_end if call.park_seconds else None,
    )
    # Whether the call may be parked was decided when the model made it.
    return await call_tool(replace(tool, park_seconds=call.park_seconds), call.input, context)
