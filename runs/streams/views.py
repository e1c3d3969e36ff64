"""``GET …/runs/{runId}/stream`` on both surfaces (docs/streams.md): permission, position and frames."""

from collections.abc import Callable, Iterator
from typing import Any

from django.conf import settings
from django.http import HttpResponse, HttpResponseBase, StreamingHttpResponse
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse, extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from config.api import live
from config.api.negotiation import AnyMediaType
from config.api.viewsets import ServiceViewSet
from config.kernel.errors import Unavailable, ValidationFailed
from runs.events import StreamType
from runs.models import Run
from runs.streams import reads
from runs.streams.hub import Hub, Opening, places
from runs.streams.reads import Event

CONTENT_TYPE = "text/event-stream"
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
COMMENT = b": keep-alive\n"  # without a blank line, which some clients would take for the end of an empty event
# Line breaks in Unicode, but not in JSON or server-sent events. Many clients split lines as Unicode does.
LINE_BREAKS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}
POSITION_MAX_DIGITS = 18
SENT_AGAIN = "The same, as clients that reconnect send it; it counts before `after`."
AT_THE_END = "`Last-Event-ID` is the last index of a finished run, or larger: do not reconnect."
POSITION = {"type": "integer", "minimum": 0, "maximum": 10**POSITION_MAX_DIGITS - 1}


def frame(event: Event) -> bytes:
    """One event as bytes. Its data is JSON text without line breaks."""
    position = f"id: {event.index}\n" if event.numbered else ""
    return f"{position}event: {event.type}\ndata: {as_line(event.data)}\n\n".encode("utf-8", "replace")


def as_line(text: str) -> str:
    return text if text.isascii() else text.translate(LINE_BREAKS)


class Frames:
    """The body of one stream (``config.api.live.Body``)."""

    def __init__(self, opening: Opening) -> None:
        self.stream = Hub.open().join(opening)
        self.close, self.leave = self.stream.close, self.stream.leave

    async def next(self) -> bytes | None:
        events = await self.stream.next()
        return None if events is None else (b"".join(map(frame, events)) or COMMENT)


def stream_response(
    request: Request, opening: Opening, parts: Iterator[bytes], open: Callable[[], live.Body], **more: Any
) -> StreamingHttpResponse:
    """A response with the body that ``open`` returns. A server other than ours sends only ``parts``, the frames of the
    events that exist now; clients reconnect for more.
    """

    def ordinary() -> Iterator[bytes]:
        try:
            yield COMMENT
            yield from parts
        finally:
            places.free(opening.place)

    live.offer(request, open)
    return StreamingHttpResponse(ordinary(), content_type=CONTENT_TYPE, headers=HEADERS | more)


def take_place(user_id: int) -> str:
    """A place for a stream. Raises Unavailable (STREAM_CONNECTIONS_MAX) or RateLimited (STREAMS_PER_USER)."""
    if Hub.of_process is not None and Hub.of_process.count >= settings.STREAM_CONNECTIONS_MAX:
        raise Unavailable
    return places.take(user_id, settings.STREAMS_PER_USER)


def opening_of(request: Request, run: Run, after: int = 0, place: str | None = None) -> Opening:
    """The stream of a run that the request may read."""
    user: Any = request.user
    auth: Any = request.auth
    is_session = isinstance(auth, dict)
    key_id = None if is_session else auth.pk
    expires_at = auth["exp"] + settings.SESSION_LEEWAY_SECONDS if is_session else None
    last, final = run.last_stream_index, run.last_stream_index if run.is_over else None
    return Opening(run.pk, after, last, final, user.pk, key_id, expires_at, place)


class StreamViewSet(ServiceViewSet):
    lookup_url_kwarg = "runId"
    required_scopes = {"stream": "runs:read"}
    content_negotiation_class = AnyMediaType
    error_statuses = {"stream": {-406}}
    query_parameters = {"stream": [OpenApiParameter("after", POSITION, description="Only events after this index.")]}

    def queryset_for(self, user: Any) -> Any:
        return Run.objects.filter(user=user, chat__deleted_at=None).only("pk", "user_id", "status", "last_stream_index")

    @extend_schema(
        description=(
            "The run's events as server-sent events, from the first one or from after the given index, and on as they "
            "happen; the stream ends after the last event of a finished run. `id` is the event's index, `data` a JSON "
            f"object. Types: {', '.join(StreamType)}."
        ),
        parameters=[OpenApiParameter("Last-Event-ID", POSITION, OpenApiParameter.HEADER, description=SENT_AGAIN)],
        responses={
            (200, CONTENT_TYPE): OpenApiResponse(OpenApiTypes.STR, description="The events."),
            204: OpenApiResponse(description=AT_THE_END),
        },
    )
    def stream(self, request: Request, runId: str) -> HttpResponseBase:
        after = position_of(request)
        run: Run = self.get_object()
        if run.is_over and request.headers.get("Last-Event-ID") and after >= run.last_stream_index:
            return Response(status=204)  # an EventSource reconnects after every other end of a stream
        if request.method == "HEAD":
            return HttpResponse(content_type=CONTENT_TYPE, headers=HEADERS)
        opening = opening_of(request, run, after, take_place(run.user_id))
        parts = map(frame, reads.existing(run.pk, after, opening.last))
        return stream_response(request, opening, parts, lambda: Frames(opening))


def position_of(request: Request) -> int:
    """The index after which the client wants to continue. Raises ValidationFailed."""
    # A client that reconnects by itself repeats its first URL, so its header is newer than the parameter.
    given = {"Last-Event-ID": request.headers.get("Last-Event-ID"), "after": request.query_params.get("after")}
    for name, text in given.items():
        if text is not None and not (text.isascii() and text.isdigit() and len(text) <= POSITION_MAX_DIGITS):
            raise ValidationFailed({name: ["Use the index of an event: a whole number from 0."]})
    return int(given["Last-Event-ID"] or given["after"] or 0)
