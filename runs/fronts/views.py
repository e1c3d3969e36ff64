"""What the routes of all protocols have in common: bodies, scopes, and streams with their places."""

import re
from collections.abc import Callable, Collection
from contextlib import ExitStack
from typing import Any, ClassVar

from django.conf import settings
from django.http import HttpResponse, HttpResponseBase
from drf_spectacular.utils import OpenApiParameter
from rest_framework.request import Request

from chats.models import Chat
from chats.services import find_chat, make_chat
from config.api import live, ratelimit
from config.api.negotiation import AnyMediaType, check_media_type
from config.api.viewsets import ServiceViewSet
from config.kernel.errors import NotFound, PayloadTooLarge, ValidationFailed
from config.kernel.jsontext import VALUES_MAX, parse_object
from config.telemetry import logs
from runs import services
from runs.fronts import starts
from runs.fronts.body import BEGINNING, Frames, FrontResponse, Position
from runs.fronts.rendering import Rendering
from runs.models import ClientRun, Run, ToolInvocation, Waitpoint
from runs.streams.hub import places
from runs.streams.views import CONTENT_TYPE, HEADERS, opening_of, take_place

POSITION = {"type": "string", "pattern": "^([0-9]{1,18})([.]([0-9]{1,18}))?$"}
POSITION_PARAMETER = OpenApiParameter("after", POSITION, description="Only frames after this one: an `id`.")
LAST_EVENT_ID = OpenApiParameter(
    "Last-Event-ID", POSITION, OpenApiParameter.HEADER, description="The same; it counts before `after`."
)
# The most JSON values in a body of up to UI_MAX_BODY_BYTES.
UI_VALUES_MAX = 4 * VALUES_MAX


class FrontViewSet(ServiceViewSet):
    """Reads the body itself: it may be larger than others, and members that we do not use are ignored."""

    parser_classes = []
    content_negotiation_class = AnyMediaType
    # The protocols have their own ids of requests.
    idempotent_actions = frozenset()
    stream_headers: ClassVar[dict[str, str]] = {}

    def chat(self, key: str) -> Chat:
        """The caller's chat with this id or client id. Raises NotFound."""
        if (found := find_chat(self.request.user, key)) is None:
            raise NotFound
        return found

    def chat_or_new(self, key: str) -> Chat:
        """The caller's chat with this id or client id; a new chat with this client id if there is none."""
        if (found := find_chat(self.request.user, key)) is None:
            self.require_scope("chats:write")
            self.require_scope("runs:write")
            found, _ = make_chat(self.request.user, client_id=key)
        return found

    def active_run(self, chat: Chat) -> Run | None:
        """The chat's active run. If that is replaced and about to end: the run in line that replaces it last."""
        run, key = None, chat.active_run_id
        while key:
            run = services.find_run(self.request.user.pk or 0, key)
            key = run.replaced_by if run is not None else None
        return run

    def frames(self, rendering: Rendering, run: Run, after: Position = BEGINNING, **how: Any) -> Frames:
        return Frames(rendering, opening_of(self.request, run), after, **how)

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
            response = FrontResponse(frames, place)
            for name, value in self.stream_headers.items():
                response[name] = value
            frees.pop_all()
        live.offer(self.request._request, response.open)
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

    def start(self, chat: Chat, key: str, options: dict[str, Any], *, given: Collection[str], **how: Any) -> ClientRun:
        """``starts.start_once`` within the caller's limits. ``given``: the options that were under ``run``."""
        request: Any = self.request
        try:
            if self.surface == "public":
                services.require_allowed_to_keys(options)
            ratelimit.charge_caller(request._request, ratelimit.run_starts_of(self.surface, request.user))
            options = options | {"request_id": logs.request_id.get() or ""}
            return starts.start_once(request.user, chat, key, options, **how)
        except ValidationFailed as error:
            raise starts.renamed(error, "run", given) from None

    def respond(self, waitpoint: Waitpoint, answer: dict[str, Any]) -> None:
        self.require_scope("waitpoints:respond")
        services.respond(waitpoint, answer | {"kind": waitpoint.kind})

    def submit(self, call: ToolInvocation, outcome: dict[str, Any]) -> None:
        self.require_scope("runs:write")
        services.submit_result(call, outcome)


def position_of(request: Request) -> Position:
    """The position after which the client continues, ``<index>.<part>``. Raises ValidationFailed."""
    given = {"after": request.query_params.get("after"), "Last-Event-ID": request.headers.get("Last-Event-ID")}
    position = BEGINNING
    for name, text in given.items():
        if text is None:
            continue
        if (found := re.fullmatch(POSITION["pattern"], text)) is None:
            raise ValidationFailed({name: ["Use the id of a frame, such as 12.1."]})
        position = int(found[1]), int(found[3] or 0)  # the header counts
    return position
