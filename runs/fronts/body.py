"""The body of a front's stream: the run's events as frames of a protocol.

A stream reads all events of its run from the first one, which restores the rendering's state, and sends the frames
after its position. It ends cleanly only where the protocol does; otherwise its connection breaks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from config.api.live import Broken
from config.kernel.jsontext import to_text
from runs.events import StreamType
from runs.fronts import reads
from runs.fronts.rendering import NO_FACTS, Facts, Part, Rendering
from runs.streams.hub import Hub, Opening, places
from runs.streams.reads import Event
from runs.streams.views import COMMENT, LINE_BREAKS, StreamResponse, existing_events

# The frame ``part`` of what the event ``index`` gives; parts count from 1.
Position = tuple[int, int]
BEGINNING = (0, 0)


@dataclass(frozen=True)
class Plan:
    """What of a run a stream shows. ``after``: the position of the last frame that the client has. ``continues``: it
    has no frames of this stream, but all that the events up to ``after`` gave.

    ``pending`` is the waitpoint that the run waits for, and ``void`` the overtaken text, up to the event ``last``.
    """

    rendering: Rendering
    last: int
    after: Position = BEGINNING
    continues: bool = False
    pending: str | None = None
    void: Sequence[range] = ()
    facts_of: Callable[[str, Event], Facts] = reads.facts_of


def plan(rendering: Rendering, last: int, after: Position = BEGINNING, *, continues: bool = False, **more: Any) -> Plan:
    run_id = rendering.run_id
    # A run that has only just been queued has neither.
    pending = reads.pending_of(run_id) if last > 1 else None
    void = reads.overtaken(run_id, after[0], last) if last > 1 else ()
    return Plan(rendering, last, after, continues, pending, void, **more)


class Frames:
    """The frames of a stream, event by event."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.rendering = plan, plan.rendering
        self.resumed = not plan.continues
        # What the waitpoint that is open gives, if the client went on without an answer to it.
        self.asked: list[Part] = []

    def of(self, event: Event, facts: reads.Facts = NO_FACTS) -> bytes:
        plan, known = self.plan, event.index <= self.plan.after[0]
        stands = not known and event.index <= plan.last
        answered = stands and event.type == StreamType.WAITPOINT_OPENED and f'"id":"{plan.pending}"' not in event.data
        void = stands and any(event.index in indexes for indexes in plan.void)
        begun = b"" if known else self.begin()
        if self.rendering.over:
            return begun
        parts = self.rendering.feed(event, facts, answered=answered, overtaken=void)
        if known and plan.continues and self.rendering.over and plan.pending and f'"id":"{plan.pending}"' in event.data:
            self.asked = parts
        if event.index < plan.after[0] or (known and plan.continues):
            self.rendering.over = False  # the client went on from there
            return begun
        return begun + self.frames(event.index, parts)

    def begin(self) -> bytes:
        """What a stream that continues begins with."""
        if self.resumed:
            return b""
        self.resumed = True
        index = self.plan.after[0]
        begun = b"".join(frame(part, f"{index}.0") for part in self.rendering.resumed())
        if not self.asked:
            return begun
        self.rendering.over = True
        return begun + self.frames(index, self.asked)

    def frames(self, index: int, parts: list[Part]) -> bytes:
        if self.rendering.over:
            parts = [*parts, *self.rendering.closing]
        positions = (((index, number), part) for number, part in enumerate(parts, 1))
        return b"".join(frame(part, f"{at[0]}.{at[1]}") for at, part in positions if at > self.plan.after)

    @property
    def may_stop(self) -> bool:
        return self.rendering.awaits_client and not self.rendering.over

    def stop(self, index: int) -> bytes:
        return self.frames(index, self.rendering.stop_for_client())


def frame(part: Part, position: str) -> bytes:
    text = part if isinstance(part, str) else to_text(part)
    return f"id: {position}\ndata: {text if text.isascii() else text.translate(LINE_BREAKS)}\n\n".encode(
        "utf-8", "replace"
    )


class FrontBody:
    """``config.api.live.Body``."""

    def __init__(self, opening: Opening, plan: Plan) -> None:
        self.stream = Hub.open().join(opening)
        self.close, self.leave = self.stream.close, self.stream.leave
        self.frames = Frames(plan)

    async def next(self) -> bytes | None:
        rendering, ask = self.frames.rendering, self.stream.hub.ask
        if rendering.over:
            return None
        events = await self.stream.next()
        if events is None:
            raise Broken
        sent = []
        for event in events:
            facts = (
                await ask(self.frames.plan.facts_of, rendering.run_id, event) if rendering.wants(event) else NO_FACTS
            )
            sent.append(self.frames.of(event, facts))
            if rendering.over:
                return b"".join(sent)
        position = self.stream.position
        if position >= self.frames.plan.after[0]:
            sent.append(self.frames.begin())
        is_idle = self.frames.may_stop and position >= self.stream.channel.last
        if is_idle and await ask(reads.only_the_client_can_go_on, rendering.run_id, list(rendering.calls)):
            sent.append(self.frames.stop(position))
        return b"".join(sent) or COMMENT


class FrontResponse(StreamResponse):
    """A ``LiveResponse`` with the frames of a protocol. Any other server than ours sends what exists now."""

    def __init__(self, opening: Opening, plan: Plan, headers: dict[str, str] | None = None) -> None:
        self.plan = plan
        super().__init__(opening)
        for name, value in (headers or {}).items():
            self[name] = value

    def existing(self) -> Iterator[bytes]:
        try:
            yield from self.existing_frames()
        finally:
            places.free(self.opening.place)

    def existing_frames(self) -> Iterator[bytes]:
        frames = Frames(self.plan)
        run_id, position = self.opening.run_id, 0
        for event in existing_events(self.opening):
            position = event.index
            facts = self.plan.facts_of(run_id, event) if frames.rendering.wants(event) else NO_FACTS
            yield frames.of(event, facts)
            if frames.rendering.over:
                return
        if frames.may_stop and reads.only_the_client_can_go_on(run_id, frames.rendering.calls):
            yield frames.begin() + frames.stop(position)

    def open(self) -> FrontBody:
        return FrontBody(self.opening, self.plan)
