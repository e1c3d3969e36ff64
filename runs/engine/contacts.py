"""Requests about parked calls to their tools' servers: to ask for an outcome, and to tell that none is wanted any more.

``contact_at`` of a call says when; no thread, connection or coroutine waits for it. The type of the tool makes the
request.
"""

from __future__ import annotations

import logging

from runs import lifecycle
from runs.engine.session import Process
from runs.models import FINAL_INVOCATION_STATUSES, Tool, ToolInvocation
from runs.tools.base import Remote, StillParked, ToolDefinition, ToolFailure
from runs.tools.dispatch import TYPES, Contact

logger = logging.getLogger(__name__)

# Requests that a process makes at a time; the others stay due.
CONTACTS_MAX = 64


async def contact(process: Process, call_id: str) -> None:
    """Contact the server of the call's tool, if it is due."""
    call = await process.db(lifecycle.take_contact, call_id)
    if call is None:
        return
    user = call.run.user
    is_open = call.status not in FINAL_INVOCATION_STATUSES
    found = await process.db_for(user.pk, _contact_of, call)
    if found is None:
        await process.db_for(user.pk, lifecycle.end_contact, call.id)
        return
    ask, definition = found
    remote = Remote(
        invocation_id=call.id,
        run_id=call.run_id,
        chat_id=call.run.chat_id,
        user_id=user.pk,
        user_name=user.get_username(),
        remote_task=call.remote_task,
        end_reason="" if is_open else call.end_reason,
    )
    try:
        async with process.tool_places.hold(user.pk):
            answer = await ask(definition, remote)
    except ToolFailure as failure:
        if is_open:
            await process.db_for(user.pk, lifecycle.record_outcome, call.id, failure)
        else:
            logger.warning("%s was not told of the end of %s: %s", call.name, call.id, failure.message)
        return
    if not is_open or answer is None:
        await process.db_for(user.pk, lifecycle.end_contact, call.id)
    elif isinstance(answer, StillParked):
        await process.db_for(user.pk, lifecycle.contact_again, call.id, answer)
    else:
        await process.db_for(user.pk, lifecycle.record_outcome, call.id, answer)


def _contact_of(call: ToolInvocation) -> tuple[Contact, ToolDefinition] | None:
    """How the tool is contacted, also a disabled one; None if it is gone, or of a type without a server."""
    row = Tool.objects.filter(name=call.name).first()
    ask = TYPES[row.node_type].contact if row is not None and row.node_type in TYPES else None
    return None if row is None or ask is None else (ask, ToolDefinition.from_row(row))
