"""``/api/schema``: the OpenAPI document, which each process generates once for each format."""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any

from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from drf_spectacular.views import SpectacularAPIView
from rest_framework.negotiation import DefaultContentNegotiation
from rest_framework.request import Request

# The parts of a document that are older than OpenAPI 3.1.
PARTS = {"openapi", "info", "servers", "paths", "components", "security", "tags", "externalDocs"}


class FormatNegotiation(DefaultContentNegotiation):
    """``?format=json`` or ``?format=yaml`` goes before the Accept header; any other format is 404."""

    def select_renderer(self, request: Request, renderers: Any, format_suffix: str | None = None) -> tuple[Any, str]:
        chosen: tuple[Any, str] = super().select_renderer(request, renderers, request.GET.get("format"))
        return chosen


class SchemaView(SpectacularAPIView):
    """``surface``: the prefix of the operations that the document describes. ``webhooks``: whether it describes them;
    some generators of clients cannot read such a document.
    """

    content_negotiation_class = FormatNegotiation
    surface = ""
    webhooks = True

    @extend_schema(exclude=True)
    def get(self, request: Request, *args: Any, **kwargs: Any) -> HttpResponse:
        renderer = request.accepted_renderer
        content, etag = document(renderer.format, self.surface, self.webhooks)
        headers = {"ETag": etag, "Cache-Control": "no-cache", "Vary": "Accept"}
        headers["Content-Disposition"] = f'inline; filename="schema.{renderer.format}"'
        return HttpResponse(content, content_type=renderer.media_type, headers=headers)


@cache
def document(format: str, surface: str, webhooks: bool) -> tuple[bytes, str]:
    """The document and its ETag."""
    schema = SchemaView.generator_class().get_schema(request=None, public=True)
    if surface:
        schema["paths"] = {path: methods for path, methods in schema["paths"].items() if path.startswith(surface)}
        used = {
            tag for methods in schema["paths"].values() for operation in methods.values() for tag in operation["tags"]
        }
        schema["tags"] = [tag for tag in schema["tags"] if tag["name"] in used]
    if not webhooks:
        schema = {name: part for name, part in schema.items() if name in PARTS}
    renderer = next(kind for kind in SchemaView.renderer_classes if kind.format == format)
    content: Any = renderer().render(schema, renderer.media_type, {})
    return content, f'"{hashlib.sha256(content).hexdigest()}"'
