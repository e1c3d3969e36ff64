"""The caller's own record, the OpenAPI document, and the answers to requests without a view."""

import hashlib
import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.template.loader import render_to_string
from django.urls import resolve
from django.views import defaults
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import conditional_page
from drf_spectacular.utils import extend_schema
from drf_spectacular.views import SpectacularAPIView, SpectacularSwaggerSplitView
from rest_framework import serializers
from rest_framework.negotiation import DefaultContentNegotiation
from rest_framework.request import Request
from rest_framework.response import Response

from config.api import ratelimit
from config.api.errors import error_response, is_api_path, response_to
from config.api.serializers import CamelSerializer, TimestampField
from config.api.viewsets import ServiceViewSet
from config.database.retry import CONNECTION_ERRORS
from config.kernel.errors import NotFound

# After this time, a browser or a person may try a page again. Most restarts of a database take less.
RETRY_SECONDS = "10"
# The parts of an OpenAPI document that are older than version 3.1.
OLD_PARTS = {"openapi", "info", "servers", "paths", "components", "security", "tags", "externalDocs"}
# Not OPTIONS, whose answer in DRF has no template and no place in the document.
READ_METHODS = ["get", "head"]
PAGE_POLICY = "default-src 'none'; style-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


class MeSerializer(CamelSerializer):
    """``GET /me``: the signed-in user (docs/api.md, "Two surfaces")."""

    id = serializers.CharField(source="pk", read_only=True, help_text="The id of the user.")
    username = serializers.CharField(read_only=True, help_text="The `sub` of the session token.")
    email = serializers.CharField(read_only=True, help_text="The e-mail address, or an empty text.")
    created_at = TimestampField(source="date_joined")


class MeViewSet(ServiceViewSet):
    serializer_class = MeSerializer

    def retrieve(self, request: Request) -> Response:
        return self.show(request.user)


class FormatNegotiation(DefaultContentNegotiation):
    """``?format=json`` or ``?format=yaml`` goes before the Accept header; any other format is 404."""

    def select_renderer(self, request: Request, renderers: Any, format_suffix: str | None = None) -> tuple[Any, str]:
        if format := request.GET.get("format"):
            renderer = self.filter_renderers(renderers, format)[0]
            return renderer, renderer.media_type
        return super().select_renderer(request, renderers)


class SchemaView(SpectacularAPIView):
    """``/api/schema``, of one ``surface`` or all. Some generators of clients cannot read one with ``webhooks``."""

    content_negotiation_class = FormatNegotiation
    http_method_names = READ_METHODS
    surface = ""
    webhooks = True

    @extend_schema(exclude=True)
    def get(self, request: Request, *args: Any, **kwargs: Any) -> HttpResponse:
        renderer = request.accepted_renderer
        content, etag = document(renderer.format, self.surface, self.webhooks)
        place = f'inline; filename="schema.{renderer.format}"'
        headers = {"ETag": etag, "Cache-Control": "no-cache", "Vary": "Accept", "Content-Disposition": place}
        return HttpResponse(content, content_type=renderer.media_type, headers=headers)


@cache
def document(format: str, surface: str, webhooks: bool) -> tuple[bytes, str]:
    """The document, which each process generates once for each format, and its ETag."""
    schema = SchemaView.generator_class().get_schema(request=None, public=True)
    if surface:
        schema["paths"] = {path: methods for path, methods in schema["paths"].items() if path.startswith(surface)}
        used = {tag for methods in schema["paths"].values() for each in methods.values() for tag in each["tags"]}
        schema["tags"] = [tag for tag in schema["tags"] if tag["name"] in used]
    if not webhooks:
        schema = {name: part for name, part in schema.items() if name in OLD_PARTS}
    renderer = next(kind for kind in SchemaView.renderer_classes if kind.format == format)
    content: Any = renderer().render(schema, renderer.media_type, {})
    return content, f'"{hashlib.sha256(content).hexdigest()}"'


def charged(view: Callable[..., HttpResponse]) -> Callable[..., HttpResponse]:
    """For a view of an API path without a credential: the address is charged before the view does any work."""

    @wraps(view)
    def limited(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        return view(request, *args, **kwargs) if ratelimit.charge_address(request).allowed else error_response(429)

    return limited


def schema(**options: Any) -> Callable[..., HttpResponse]:
    return conditional_page(charged(SchemaView.as_view(**options)))


docs = SpectacularSwaggerSplitView.as_view(
    url_name="schema", template_name="docs/api.html", http_method_names=READ_METHODS
)


@csrf_exempt
@charged
def unknown_path(request: HttpRequest, *args: Any) -> HttpResponse:
    """The answer to all paths under /api without a route."""
    path = request.path_info
    if path.endswith("/") and resolve(path.rstrip("/")).func is not unknown_path:
        return response_to(NotFound("Not found: this path has no slash at its end."))
    return error_response(404)


# Also for exceptions of middleware before ApiErrorMiddleware, such as a wrong Host.
def bad_request(request: HttpRequest, exception: Exception) -> HttpResponse:
    return error_response(400) if is_api_path(request.path_info) else defaults.bad_request(request, exception)


def server_error(request: HttpRequest) -> HttpResponse:
    """Django calls this while it handles the exception."""
    away = isinstance(sys.exc_info()[1], CONNECTION_ERRORS)
    if is_api_path(request.path_info):
        return error_response(503 if away else 500)
    if not away:
        return defaults.server_error(request)
    headers = {"Retry-After": RETRY_SECONDS, "Cache-Control": "no-store", "Content-Security-Policy": PAGE_POLICY}
    return HttpResponse(render_to_string("staff/unavailable.html"), status=503, headers=headers)
