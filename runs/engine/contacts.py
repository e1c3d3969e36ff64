"""Requests to the servers of parked calls' tools: they ask for the outcome, or say that it is no longer wanted."""

import asyncio
import logging
from collections import Counter
from urllib.parse import urlsplit

from config.kernel.errors import NotFound
from runs import catalogue, lifecycle
from runs.engine.process import Process, wait_within
from runs.models import ToolInvocation
from runs.tools.base import Parked, ToolDefinition, ToolFailure, ToolResult, clean_result
from runs.tools.dispatch import type_of
from runs.tools.files import store_images

logger = logging.getLogger(__name__)

# The most requests of a process at a time: in all, to one server, and for one user. So a slow server, or a user with
# many calls, delays no other. Calls without a place stay due.
CONTACTS_MAX = 512
CONTACTS_PER_SERVER = 32
CONTACTS_PER_USER = 16
LOOK_SECONDS = 0.5  # between two looks for calls that are due


class Contacts:
    """One in each process. It runs on the engine's event loop."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.under_way: Counter[str | int] = Counter()  # by server and by user
        self.known: dict[str, str] = {}  # the server of each tool that had a due call
        self.woken = asyncio.Event()  # when it is set, the next look comes at once

    async def run(self) -> None:
        while True:
            await wait_within(LOOK_SECONDS, self.woken)
            self.woken.clear()
            try:
                while await self._look():
                    pass
            except Exception:
                logger.exception("the look for calls that are due failed")

    async def _look(self) -> bool:
        """Begin requests about calls that are due. Returns whether there may be more that can begin now."""
        room = CONTACTS_MAX - len(self.tasks)
        if room <= 0 or self.process.draining:
            return False
        full = {name for name, server in self.known.items() if self.under_way[server] >= CONTACTS_PER_SERVER}
        busy = {user for user, count in self.under_way.items() if isinstance(user, int) and count >= CONTACTS_PER_USER}
        due = await self.process.db(lifecycle.due_contacts, room, CONTACTS_PER_USER, full, busy)
        names = {name for _, name, *_ in due}
        definitions = await self.process.db(catalogue.tools_where, name__in=names) if due else {}
        self.known |= {name: urlsplit(tool.url).netloc for name, tool in definitions.items()}
        places = Counter(self.under_way)
        chosen: list[str] = []
        # Users with the fewest open requests come first.
        for call_id, name, user_id, _ in sorted(due, key=lambda row: row[3] + self.under_way[row[2]]):
            server = self.known.get(name, "")
            if places[server] < CONTACTS_PER_SERVER and places[user_id] < CONTACTS_PER_USER:
                places.update((server, user_id))
                chosen.append(call_id)
        taken = await self.process.db(lifecycle.take_contacts, chosen) if chosen else []
        if self.process.draining:
            return False  # the engine may have cancelled its requests by now; these calls become due again
        for call in taken:
            server = self.known.get(call.name, "")
            self.under_way.update((server, call.run.user_id))
            self.tasks[call.id] = asyncio.create_task(self._contact(call, definitions.get(call.name), server))
        return len(due) == room and bool(taken)

    async def _contact(self, call: ToolInvocation, tool: ToolDefinition | None, server: str) -> None:
        try:
            await contact(self.process, call, tool)
        except NotFound:
            pass  # the run was erased meanwhile
        except Exception:
            logger.exception("the server of the tool of %s could not be contacted", call.id)
        finally:
            if self.under_way[server] == CONTACTS_PER_SERVER or self.under_way[call.run.user_id] == CONTACTS_PER_USER:
                self.woken.set()  # other calls wait for this place
            self.under_way -= Counter((server, call.run.user_id))
            if self.tasks.get(call.id) is asyncio.current_task():
                del self.tasks[call.id]


async def contact(process: Process, call: ToolInvocation, tool: ToolDefinition | None) -> None:
    """Contact the tool's server of a call of ``take_contacts``. If the tool is deleted, an open call stays due."""
    user, kind = call.run.user, type_of(tool) if tool else None
    answer: ToolResult | ToolFailure | Parked | None = None
    if tool is not None and kind is not None and kind.contact is not None:
        # Each type has its own time limit for such requests.
        about = {"user_name": user.get_username(), "timeout_seconds": 0.0, "end_reason": call.end_reason}
        context = process.tool_context(call.run, call, **about)
        try:
            answer = await kind.contact(tool, context)
            if isinstance(answer, ToolResult):
                answer = clean_result(await store_images(context, answer))
        except ToolFailure as failure:
            if not call.is_open:
                logger.warning("%s was not told of the end of %s: %s", call.name, call.id, failure.message)
                return
            answer = failure
    elif call.is_open:
        return
    await process.db_for(user.pk, lifecycle.record_contact, call, answer)
