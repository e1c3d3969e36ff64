"""Streamed text on its way to the database: that of all the process's runs together, at most once in
STREAM_FLUSH_SECONDS."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from django.conf import settings

from runs.lifecycle import runs

if TYPE_CHECKING:
    from runs.engine.engine import Engine
    from runs.engine.loop import RunLoop

logger = logging.getLogger(__name__)

# After an error that is not the database's absence, which is waited out below.
AGAIN_SECONDS = 1.0


class TextFlusher:
    """Writes the pending text of many runs in one transaction. While one is slow, more text gathers for the next."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.waiting: dict[str, RunLoop] = {}
        self.wake = asyncio.Event()

    def add(self, loop: RunLoop) -> None:
        self.waiting[loop.run.id] = loop
        self.wake.set()

    async def run(self) -> None:
        while True:
            await self.wake.wait()
            await asyncio.sleep(settings.STREAM_FLUSH_SECONDS)
            self.wake.clear()
            try:
                await self.flush()
            except Exception:
                logger.exception("streamed text could not be written; the next flush tries again")
                await asyncio.sleep(AGAIN_SECONDS)

    async def flush(self) -> None:
        waiting, self.waiting = self.waiting, {}
        loops: list[RunLoop] = []
        for loop in waiting.values():
            if loop.lock.locked():
                # The run is being recorded just now, its pending text with it; if not, the next flush finds it.
                self.add(loop)
            elif loop.pending_text:
                loops.append(loop)
        for loop in loops:
            await loop.lock.acquire()
        try:
            taken = [(loop, loop.take_pending()) for loop in loops]
            taken = [(loop, text) for loop, text in taken if text]
            if not taken:
                return
            try:
                lost = await self.engine.db(runs.write_deltas, [(loop.run, text) for loop, text in taken])
            except BaseException:
                for loop, text in taken:
                    loop.pending_text.insert(0, text)
                    self.add(loop)
                raise
        finally:
            for loop in loops:
                loop.lock.release()
        for run_id in lost:
            self.engine.lose(run_id)
