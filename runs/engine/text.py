"""Writes the streamed text of all runs of a process: one transaction for all, at most once in STREAM_FLUSH_SECONDS."""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from runs import lifecycle
from runs.engine.session import Gathered, Process, Session

# Minimum time between two writes of streamed text; the first text of a turn does not wait for it.
STREAM_FLUSH_SECONDS = 0.05

logger = logging.getLogger(__name__)

# After an error other than the database's absence, which ``Database.run`` waits out.
PAUSE_SECONDS = 1.0
# First texts that arrive within this time are written together. A short answer is often complete by then.
FIRST_TEXT_SECONDS = 0.01

Interrupt = Callable[[Session], None]


async def flush_forever(process: Process, interrupt: Interrupt) -> None:
    """``interrupt`` is called for each session whose run is not as it knows it."""

    async def work(gathered: Gathered, seconds: Callable[[], float]) -> None:
        while True:
            await gathered.added.wait()
            await asyncio.sleep(seconds())
            try:
                await flush(process, gathered.take(), interrupt)
            except Exception:
                logger.exception("streamed text could not be written; the next flush tries again")
                await asyncio.sleep(PAUSE_SECONDS)

    await asyncio.gather(
        work(process.unwritten, lambda: STREAM_FLUSH_SECONDS), work(process.begun, lambda: FIRST_TEXT_SECONDS)
    )


async def flush(process: Process, waiting: list[Session], interrupt: Interrupt) -> None:
    """While one flush is slow, more text gathers for the next."""
    async with contextlib.AsyncExitStack() as locks:
        taken: list[tuple[Session, str]] = []
        # In one order, because the other flush may want the same sessions.
        for session in sorted(waiting, key=lambda session: session.run.id):
            if session.lock.locked():
                # The step that holds the lock may record the text; if it does not, the next flush writes it.
                process.unwritten.add(session)
            elif session.unwritten_text:
                await locks.enter_async_context(session.lock)
                if text := session.take_unwritten():
                    taken.append((session, text))
        if not taken:
            return
        try:
            written = await process.db(lifecycle.append_text, [(session.run, text) for session, text in taken])
        except BaseException:
            for session, text in taken:
                session.put_back(text)
            raise
        for session, text in taken:
            if session.run.id not in written:
                interrupt(session)
            elif written[session.run.id] is session.run:  # its row is locked; the next flush tries again
                session.put_back(text)
            else:
                session.run = written[session.run.id]
