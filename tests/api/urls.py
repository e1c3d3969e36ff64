"""Routes of viewsets that only the API tests use, and the routes of /me and of API keys."""

import threading
from decimal import Decimal
from typing import Any

from django.contrib.auth.models import Group
from django.core.exceptions import PermissionDenied
from django.db import OperationalError
from django.http import HttpRequest, HttpResponse
from django.urls import path
from drf_spectacular.utils import OpenApiParameter
from rest_framework.request import Request
from rest_framework.response import Response

from config.api.viewsets import ServiceViewSet
from config.kernel.errors import Conflict
from config.urls import handler400, handler500  # noqa: F401
from config.urls import urlpatterns as real

# ``create`` waits in the middle of its work until this event is set.
may_continue = threading.Event()
may_continue.set()
entered = threading.Event()


class Groups(ServiceViewSet):
    """``create`` makes a Group, so a test can count the rows."""

    required_scopes = {"create": "runs:write", "list": "runs:read", "echo": ""}
    throttle_run_starts = frozenset({"create"})
    query_parameters = {"create": [OpenApiParameter("q")], "list": [OpenApiParameter("q")]}

    def create(self, request: Request) -> Response:
        name = request.data.get("name", "")
        group = Group.objects.create(name=name + f"-{Group.objects.count()}")
        entered.set()
        may_continue.wait(30)
        if name == "refuse":
            raise Conflict
        if name == "crash":
            raise RuntimeError("a secret of the server")
        return Response({"name": group.name, "amount": Decimal("0.1"), "text": "ü"}, status=201)

    def echo(self, request: Request) -> Response:
        return Response(request.data)

    def list(self, request: Request) -> Response:
        return Response({"items": [request.query_params.get("q")]})


class SecretGroups(Groups):
    secret_actions = frozenset({"create"})


def fail(request: HttpRequest, kind: str) -> HttpResponse:
    """A view outside of DRF that raises the error named by ``kind``."""
    failures: dict[str, Any] = {
        "crash": RuntimeError("SELECT secret"),
        "forbidden": PermissionDenied("secret"),
        "database": OperationalError("secret"),
        "overflow": RecursionError("secret"),
    }
    if kind == "html":
        return HttpResponse("<h1>secret</h1>", status=418)
    raise failures[kind]


groups = {"post": "create", "get": "list", "put": "echo", "patch": "echo"}
urlpatterns = [
    path("api/v1/groups", Groups.as_view(groups)),
    path("api/v1/secret-groups", SecretGroups.as_view(groups)),
    path("api/public/v1/groups", Groups.as_view(groups, surface="public")),
    path("api/fail/<kind>", fail),
    path("fail/<kind>", fail),
    *real,
]
