"""What the routes of all protocols have in common: scopes, requests, and streams of frames with their places.

A stream reads all events of its run from the first one, which restores the rendering's state, and sends the frames
after its position. It ends cleanly only where the protocol allows an end; otherwise its connection breaks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

from django.conf import settings
from django.http import HttpResponse, HttpResponseBase
from rest_framework.request import Request

from chats.models import Chat
from chats.services import find_chat, make_chat
from config.api import live, ratelimit
from config.api.negotiation import AnyMediaType, check_media_type
from config.api.viewsets import ServiceViewSet
from config.kernel.errors import NotFound, PayloadTooLarge, ValidationFailed
from config.kernel.jsontext import VALUES_MAX, parse_object, to_text
from config.telemetry import logs
from runs import services
from runs.fronts import reads, starts
from runs.fronts.rendering import Facts, Part, Rendering
from runs.models import Run, ToolInvocation, Waitpoint
from runs.streams.hub import Hub, Opening, places
from runs.streams.reads import Event, existing
from runs.streams.views import COMMENT, CONTENT_TYPE, HEADERS, as_line, stream_response, take_place

POSITION = {"type": "string", "pattern": "^([0-9]{1,18})([.]([0-9]{1,18}))?$"}
UI_VALUES_MAX = 4 * VALUES_MAX  # JSON values in a body of up to UI_MAX_BODY_BYTES
# The index of an event, and the number of a frame among the event's frames, from 1.
Position = tuple[int, int]
BEGINNING = (0, 0)


@dataclass
class Frames:
    """The frames of a run in a stream, event by event. ``after``: the position of the last frame that the client has.
    ``continues``: the client has no frames of this stream, but it has the content of the events up to ``after``.
    ``then``: the frames that the same stream shows after the end of this run.
    """

    rendering: Rendering
    opening: Opening
    after: Position = BEGINNING
    continues: bool = field(default=False, kw_only=True)
    then: Frames | None = field(default=None, kw_only=True)
    # The last event that was rendered, and the number of its frames.
    index = count = 0

    def __post_init__(self) -> None:
        # Among the events up to ``last``, those in ``void`` have overtaken text, and after the event ``asks_at`` the
        # user is asked. A run that was only queued has neither.
        run_id, self.last = self.rendering.run_id, self.opening.last
        self.asks_at = reads.asks_at(run_id, self.last) if self.last > 1 else 0
        self.void = reads.overtaken(run_id, self.after[0], self.last) if self.last > 1 else ()

    def of(self, event: Event, facts: Facts = None) -> bytes:
        index, rendering = event.index, self.rendering
        known = index < self.after[0] + self.continues
        if rendering.over:
            return b""
        void = self.after[0] < index <= self.last and any(index in indexes for indexes in self.void)
        parts = rendering.feed(event, facts, asks=index > self.last, overtaken=void)
        if index == self.asks_at and not known:
            parts += rendering.ask_now()
        sent = self.frames(index, parts)
        return b"" if known else sent

    def begin(self, following: int) -> bytes:
        """What a stream that continues begins with, before the facts of the ``following`` event are read."""
        if not self.continues or following <= self.after[0]:
            return b""
        self.continues = False
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
        return b"".join(frame(part, f"{index}.{at}") for at, part in news)

    def stop(self) -> bytes:
        return self.frames(self.index, self.rendering.stop_for_client())

    def following(self) -> Frames | None:
        """The frames that follow in the same stream, or None."""
        return self.then if self.rendering.has_ended else None

    def existing(self) -> Iterator[bytes]:
        """The frames of all events that exist now, and of the runs that follow."""
        rendering = self.rendering
        for event in existing(rendering.run_id, 0, self.last):
            yield self.begin(event.index)
            yield self.of(event, rendering.facts_of(event))
            if rendering.over:
                then = self.following()
                yield from then.existing() if then else ()
                return
        yield self.begin(self.after[0] + 1)
        if rendering.awaits_client and reads.only_the_client_can_go_on(rendering.run_id, rendering.calls, self.index):
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
        self.streams[-1].close()  # the ones before have ended

    def leave(self) -> None:
        for stream in self.streams:
            stream.leave()

    async def next(self) -> bytes | None:
        stream, frames, rendering = self.streams[-1], self.frames, self.frames.rendering
        if rendering.over:
            if (then := frames.following()) is None:
                return None
            if stream.closed:
                raise live.Broken
            self.frames = then
            self.streams.append(stream.hub.join(then.opening))
            return COMMENT
        ask, sent = stream.hub.ask, list[bytes]()
        events = await stream.next()
        if events is None:
            raise live.Broken
        for event in events:
            sent.append(frames.begin(event.index))
            facts = await ask(rendering.facts_of, event) if rendering.wants(event) else None
            sent.append(frames.of(event, facts))
            if rendering.over:
                return b"".join(sent) or COMMENT
        sent.append(frames.begin(stream.position + 1))
        is_idle = rendering.awaits_client and stream.position >= stream.channel.last
        known = rendering.run_id, list(rendering.calls), stream.position
        if is_idle and await ask(reads.only_the_client_can_go_on, *known):
            sent.append(frames.stop())
        return b"".join(sent) or COMMENT


class FrontViewSet(ServiceViewSet):
    """Reads the body itself: it may be larger than others, and members that we do not use are ignored."""

    parser_classes = []
    content_negotiation_class = AnyMediaType
    idempotent_actions = frozenset()  # the protocols have their own ids of requests
    stream_headers: ClassVar[dict[str, str]] = {}

    def chat(self, key: str, *, make: bool = False) -> Chat:
        """The caller's chat with this id or client id. If there is none: with ``make``, a new one with this client id.
        Raises NotFound without ``make``, and Forbidden if the key lacks the scopes for a new chat.
        """
        found = find_chat(self.request.user, key)
        if found is None and make:
            self.require_scope("chats:write")
            self.require_scope("runs:write")
            found, _ = make_chat(self.request.user, client_id=key)
        if found is None:
            raise NotFound
        return found

    def active_run(self, chat: Chat) -> Run | None:
        """The chat's active run. If that is replaced and about to end: the run in line that replaces it last."""
        run, key = None, chat.active_run_id
        while key:
            run = services.find_run(self.request.user.pk or 0, key)
            key = run.replaced_by if run is not None else None
        return run

    def open_stream(self, show: Callable[[], Frames]) -> HttpResponseBase:
        """The stream of the frames that ``show`` returns. Its place is taken first: a refused client starts nothing."""
        if self.request.method == "HEAD":
            return HttpResponse(content_type=CONTENT_TYPE, headers=HEADERS | self.stream_headers)
        user_id: Any = self.request.user.pk
        with ExitStack() as frees:
            place = take_place(user_id)
            frees.callback(places.free, place)
            frames = show()
            logs.run_id.set(frames.rendering.run_id)
            opening = replace(frames.opening, place=place)
            body = partial(FrontBody, opening, frames)
            response = stream_response(self.request, opening, frames.existing(), body, **self.stream_headers)
            frees.pop_all()
        return response

    def body(self) -> dict[str, Any]:
        """The parsed body. Fields that are used must pass ``require_text``: a history can repeat a refused message."""
        request = self.request._request
        size = int(request.META.get("CONTENT_LENGTH") or 0)
        if size == 0:
            return {}
        check_media_type(self.request.content_type)
        if size > settings.UI_MAX_BODY_BYTES:
            raise PayloadTooLarge(f"The body may have at most {settings.UI_MAX_BODY_BYTES} bytes.")
        return parse_object(request.read(), values=UI_VALUES_MAX, any_text=True)

    def start(self, chat: Chat, key: str, options: dict[str, Any], *, given: Collection[str], **how: Any) -> Run:
        """``starts.start_once`` within the caller's limits. ``given``: the options that were under ``run``."""
        request: Any = self.request
        with starts.fields_under("run", given):
            services.require_allowed(self.surface, options)
            ratelimit.charge_caller(request._request, ratelimit.run_starts_of(self.surface, request.user))
            options = options | {"request_id": logs.request_id.get() or ""}
            return starts.start_once(request.user, chat, key, options, **how)

    def respond(self, waitpoint: Waitpoint, answer: dict[str, Any]) -> None:
        self.require_scope("waitpoints:respond")
        services.respond(waitpoint, answer | {"kind": waitpoint.kind})

    def submit(self, call: ToolInvocation, outcome: dict[str, Any]) -> None:
        self.require_scope("runs:write")
        services.submit_result(call, outcome)


def position_of(request: Request) -> Position:
    """The position after which the client continues, ``<index>.<part>``. Raises ValidationFailed."""
    given = {"after": request.query_params.get("after"), "Last-Event-ID": request.headers.get("Last-Event-ID")}
    for name, text in given.items():
        if text is not None and not re.fullmatch(POSITION["pattern"], text):
            raise ValidationFailed({name: ["Use the id of a frame, such as 12.1."]})
    # A client that reconnects by itself repeats its first URL, so its header is newer than the parameter.
    index, _, part = (given["Last-Event-ID"] or given["after"] or "0").partition(".")
    return int(index), int(part or 0)
