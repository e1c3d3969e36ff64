"""The body of a front's stream: the run's events as frames of a protocol.

A stream reads all events of its run from the first one, which restores the rendering's state, and sends the frames
after its position. It ends cleanly only where the protocol allows an end; otherwise its connection breaks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from config.api.live import Broken
from config.kernel.jsontext import to_text
from runs.fronts import reads
from runs.fronts.rendering import Facts, Part, Rendering
from runs.streams.hub import Hub, Opening
from runs.streams.reads import Event, existing
from runs.streams.views import COMMENT, StreamResponse, as_line

# The index of an event, and the number of a frame among the event's frames, from 1.
Position = tuple[int, int]
BEGINNING = (0, 0)


class Frames:
    """The frames of a run in a stream, event by event. ``after``: the position of the last frame that the client has.
    ``continues``: the client has no frames of this stream, but it has the content of the events up to ``after``.
    ``then``: the frames that the same stream shows after the end of this run.
    """

    def __init__(
        self,
        rendering: Rendering,
        opening: Opening,
        after: Position = BEGINNING,
        *,
        continues: bool = False,
        then: Frames | None = None,
    ) -> None:
        self.rendering, self.opening, self.after, self.continues, self.then = rendering, opening, after, continues, then
        self.resumed = not continues
        # The sum of the last indexes of the runs that the same stream showed before this one.
        self.earlier = 0
        # The last event that was rendered, and the number of its frames.
        self.index = self.count = 0
        # Among the events up to ``last``, those in ``void`` have overtaken text, and after the event ``asks_at`` the
        # user is asked. A run that was only queued has neither.
        run_id, self.last = rendering.run_id, opening.last
        self.asks_at = reads.asks_at(run_id, self.last) if self.last > 1 else 0
        self.void = reads.overtaken(run_id, after[0], self.last) if self.last > 1 else ()

    def of(self, event: Event, facts: Facts = None) -> bytes:
        index, rendering = event.index, self.rendering
        known = index < self.after[0] + self.continues
        begun = self.begin() if index > self.after[0] else b""
        if rendering.over:
            return begun
        void = self.after[0] < index <= self.last and any(index in indexes for indexes in self.void)
        parts = rendering.feed(event, facts, asks=index > self.last, overtaken=void)
        if index == self.asks_at and not known:
            parts += rendering.ask_now()
        sent = self.frames(index, parts)
        return b"" if known else begun + sent

    def begin(self) -> bytes:
        """What a stream that continues begins with."""
        if self.resumed:
            return b""
        self.resumed = True
        index = self.after[0]
        parts = self.rendering.resumed()
        # The client continues without an answer: it is asked again.
        parts += self.rendering.ask_now() if 0 < self.asks_at <= index else []
        return self.frames(index, parts)

    def frames(self, index: int, parts: list[Part]) -> bytes:
        if self.rendering.over:
            parts = [*parts, *self.rendering.closing]
        first = self.count + 1 if index == self.index else 1
        self.index, self.count = index, first + len(parts) - 1
        news = ((at, part) for at, part in enumerate(parts, first) if (index, at) > self.after)
        return b"".join(frame(part, f"{self.earlier + index}.{at}") for at, part in news)

    @property
    def may_stop(self) -> bool:
        return self.rendering.awaits_client and not self.rendering.over

    def stop(self) -> bytes:
        return self.frames(self.index, self.rendering.stop_for_client())

    def following(self) -> Frames | None:
        """The frames that follow in the same stream, or None."""
        if self.then is None or not self.rendering.has_ended:
            return None
        self.then.earlier = self.earlier + self.index
        return self.then

    def existing(self) -> Iterator[bytes]:
        """The frames of all events that exist now."""
        rendering = self.rendering
        for event in existing(rendering.run_id, 0, self.last):
            yield self.of(event, rendering.facts_of(event))
            if rendering.over:
                return
        yield self.begin()
        if self.may_stop and reads.only_the_client_can_go_on(rendering.run_id, rendering.calls, self.index):
            yield self.stop()


def frame(part: Part, position: str) -> bytes:
    text = part if isinstance(part, str) else as_line(to_text(part))
    return f"id: {position}\ndata: {text}\n\n".encode("utf-8", "replace")


class FrontBody:
    """Implements ``config.api.live.Body``."""

    def __init__(self, opening: Opening, frames: Frames) -> None:
        self.streams = [Hub.open().join(opening)]
        self.frames = frames

    def close(self) -> None:
        for stream in self.streams:
            stream.close()

    def leave(self) -> None:
        for stream in self.streams:
            stream.leave()

    async def next(self) -> bytes | None:
        stream, frames, rendering = self.streams[-1], self.frames, self.frames.rendering
        if rendering.over:
            if (then := frames.following()) is None:
                return None
            if stream.closed:
                raise Broken
            self.frames = then
            self.streams.append(stream.hub.join(then.opening))
            return COMMENT
        ask, sent = stream.hub.ask, list[bytes]()
        events = await stream.next()
        if events is None:
            raise Broken
        for event in events:
            facts = await ask(rendering.facts_of, event) if rendering.wants(event) else None
            sent.append(frames.of(event, facts))
            if rendering.over:
                return b"".join(sent) or COMMENT
        if stream.position >= frames.after[0]:
            sent.append(frames.begin())
        is_idle = frames.may_stop and stream.position >= stream.channel.last
        known = rendering.run_id, list(rendering.calls), stream.position
        if is_idle and await ask(reads.only_the_client_can_go_on, *known):
            sent.append(frames.stop())
        return b"".join(sent) or COMMENT


class FrontResponse(StreamResponse):
    """A stream with the frames of a protocol. A server other than ours only sends what exists now."""

    def __init__(self, frames: Frames, place: str | None = None) -> None:
        self.frames = frames
        super().__init__(replace(frames.opening, place=place))

    def existing(self) -> Iterator[bytes]:
        frames: Frames | None = self.frames
        while frames is not None:
            yield from frames.existing()
            frames = frames.following()

    def open(self) -> FrontBody:
        return FrontBody(self.opening, self.frames)
