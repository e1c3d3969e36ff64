"""What an answer is written as."""

from typing import Any

from rest_framework.negotiation import BaseContentNegotiation, DefaultContentNegotiation
from rest_framework.renderers import BaseRenderer

from config.kernel.jsontext import dumps

# What nearly every client sends, if it sends anything.
USUAL = (None, "*/*", "application/json")


class ExactJSONRenderer(BaseRenderer):
    """A Decimal becomes a JSON number as it stands: never an exponent, never by way of a float."""

    media_type = "application/json"
    format = "json"
    charset = None  # JSON is UTF-8; the media type has no such parameter

    def render(self, data: Any, accepted_media_type: str | None = None, renderer_context: Any = None) -> bytes:
        return b"" if data is None else dumps(data)


class JsonNegotiation(DefaultContentNegotiation):
    """DRF's own, but that the usual Accept headers are not parsed where there is nothing but JSON. It reads the query,
    too, and refuses one that is too long.
    """

    def select_renderer(self, request: Any, renderers: Any, format_suffix: Any = None) -> tuple[Any, str]:
        if (
            request.META.get("HTTP_ACCEPT") in USUAL
            and len(renderers) == 1
            and renderers[0].media_type == "application/json"
            and not (format_suffix or request.META.get("QUERY_STRING"))
        ):
            return renderers[0], "application/json"
        chosen: tuple[Any, str] = super().select_renderer(request, renderers, format_suffix)
        return chosen


class AnyMediaType(BaseContentNegotiation):
    """For endpoints that answer with something else than JSON: errors are JSON and the content is what it is, so there
    is nothing to choose, whatever Accept says.
    """

    def select_renderer(self, request: Any, renderers: Any, format_suffix: Any = None) -> tuple[Any, str]:
        return renderers[0], renderers[0].media_type
