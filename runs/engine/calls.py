"""The tool calls of one run: checked, asked about where need be, dispatched, made and recorded.

Part of ``RunLoop``, whose journal, run and database steps these are; so between steps nothing is remembered here.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from django.conf import settings

from config.kernel import clock, money
from config.kernel.ids import new_id
from runs.lifecycle import calls as transitions
from runs.lifecycle import waitpoints
from runs.lifecycle.crash import crash_point
from runs.llm.base import ToolCall
from runs.models import InvocationStatus, Run, Tool, ToolInvocation, WaitpointKind
from runs.tools.base import ASK_USER, BUILTIN, ToolContext, ToolDefinition, ToolFailure
from runs.tools.dispatch import call_tool
from runs.tools.schema import parse_input

if TYPE_CHECKING:
    from runs.engine.loop import RunLoop


def approval_threshold(run: Run) -> int:
    """Micro-credits above which a call of the run needs approval."""
    if run.credit_approval_threshold is not None:
        return run.credit_approval_threshold
    return money.parse(settings.CREDIT_APPROVAL_THRESHOLD)


class RunCalls:
    """What ``RunLoop`` does about its run's tool calls."""

    def __init__(self, loop: RunLoop) -> None:
        self.loop = loop

    def invocations_of(self, turn_index: int, calls: list[ToolCall]) -> list[ToolInvocation]:
        """New invocations, unsaved; those that name no tool or whose input does not fit are failed already."""
        tools = self.loop.journal.tools()
        return [self._invocation(turn_index, index, call, tools) for index, call in enumerate(calls, 1)]

    def _invocation(
        self, turn_index: int, call_index: int, call: ToolCall, tools: dict[str, ToolDefinition]
    ) -> ToolInvocation:
        tool = tools.get(call.name)
        now = clock.now()
        invocation = ToolInvocation(
            id=new_id("inv"),
            run=self.loop.run,
            turn_index=turn_index,
            call_index=call_index,
            tool_call_id=call.id,
            name=call.name,
            node_type=tool.node_type if tool else BUILTIN,
            credit_estimate=tool.price if tool else 0,
            repeatable=tool.repeatable if tool else False,
            created_at=now,
            updated_at=now,
        )
        if tool is None:
            transitions.fail_unmade(invocation, "UNKNOWN_TOOL", f"There is no tool named {call.name}.")
            return invocation
        try:
            invocation.input = parse_input(tool, call.arguments)
        except ToolFailure as failure:
            transitions.fail_unmade(invocation, failure.code, failure.message)
        return invocation

    def unasked(self, calls: list[ToolInvocation]) -> list[ToolInvocation]:
        """Those that can be made without an answer from anybody."""
        return [call for call in calls if call.status == InvocationStatus.PENDING and self._question(call) is None]

    def _question(self, call: ToolInvocation) -> tuple[str, dict[str, Any]] | None:
        """What has to be asked before the call is made, as (waitpoint kind, its request payload)."""
        journal = self.loop.journal
        if call.id in journal.answers:
            return None
        if call.name == ASK_USER:
            payload = {"question": call.input["question"]}
            if "options" in call.input:
                payload["options"] = call.input["options"]
            return WaitpointKind.CLARIFICATION, payload
        tool = journal.tools().get(call.name)
        if tool is None or tool.approval == Tool.Approval.NEVER:
            return None
        threshold = approval_threshold(self.loop.run)
        if tool.approval == Tool.Approval.THRESHOLD and call.credit_estimate <= threshold:
            return None
        return WaitpointKind.CREDIT_APPROVAL, {
            "toolName": call.name,
            "estimatedMicro": call.credit_estimate,
            "thresholdMicro": threshold,
        }

    async def go_on(self) -> None:
        """Go on with the calls that are open: those that need no answer side by side, then one question at a time."""
        loop = self.loop
        left = loop.journal.open_calls
        # Those that this loop dispatched have an end by now, unless the loop was interrupted on the way.
        orphans = [call for call in left if call.status == InvocationStatus.DISPATCHING]
        pending = [call for call in left if call.status == InvocationStatus.PENDING]
        answered = [call for call in pending if call.id in loop.journal.answers]
        ready = [call for call in self.unasked(pending) if call not in answered]
        if not (orphans or answered or ready):
            await self._ask(pending[0])
            return
        crash_point("before_dispatch")
        begun = [call for call in orphans if await self._take_up(call)]
        if answered:
            begun += await loop.db(transitions.dispatch, loop.run, answered, approved=True)
        if ready:
            begun += await loop.db(transitions.dispatch, loop.run, ready)
        await self.execute(begun)

    async def _take_up(self, call: ToolInvocation) -> bool:
        """A call whose worker was lost: made again if it may be, with the same id; else its outcome is unknown."""
        if call.repeatable and call.name in self.loop.journal.tools():
            return True
        message = "The worker was lost while the tool was at work; whether it took effect is not known."
        await self._failed(call, "OUTCOME_UNKNOWN", message)
        return False

    async def _ask(self, call: ToolInvocation) -> None:
        """The run waits afterwards, unless the call can't be paid for."""
        loop = self.loop
        question = self._question(call)
        assert question is not None  # noqa: S101  (only such calls are left)
        if await loop.db(transitions.exceeds_budget, loop.run, call.credit_estimate):
            await self._failed(call, "BUDGET_EXCEEDED", "The call would take the run over its maxCredits.")
            return
        crash_point("before_wait")
        await loop.db(waitpoints.open_waitpoint, loop.run, call, *question)

    async def execute(self, calls: list[ToolInvocation]) -> None:
        """Make dispatched calls side by side, and record what comes of each."""
        if len(calls) == 1:
            await self._execute_one(calls[0])
        elif calls:
            tasks = [asyncio.ensure_future(self._execute_one(call)) for call in calls]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _execute_one(self, call: ToolInvocation) -> None:
        loop = self.loop
        crash_point("after_dispatch")
        await loop.confirm_lease()
        try:
            if call.name == ASK_USER:
                answer = (loop.journal.answers[call.id].resolved_payload or {})["answer"]
                await loop.db(transitions.record_result, loop.run, call, text=answer)
                return
            tool = loop.journal.tools().get(call.name)
            if tool is None:
                raise ToolFailure("UNKNOWN_TOOL", f"There is no tool named {call.name} any more.")
            context = ToolContext(
                invocation_id=call.id,
                run_id=loop.run.id,
                chat_id=loop.run.chat_id,
                user_id=loop.run.user_id,
                timeout_seconds=max(0.1, loop.journal.remaining_seconds()),
                executor=loop.engine.tool_threads,
            )
            result = await call_tool(tool, call.input, context)
        except ToolFailure as failure:
            await self._failed(call, failure.code, failure.message)
            return
        crash_point("after_tool")
        await loop.db(
            transitions.record_result,
            loop.run,
            call,
            text=result.text,
            urls=result.urls,
            credit_used=result.credit_used,
        )

    async def _failed(self, call: ToolInvocation, code: str, message: str) -> None:
        await self.loop.db(transitions.record_failure, self.loop.run, call, code, message)
