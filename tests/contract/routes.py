"""Every operation of both surfaces, read from the URL configuration, so new routes are tested automatically."""

import re
from dataclasses import dataclass
from typing import Any

from django.urls import URLPattern, URLResolver, get_resolver
from rest_framework.test import APIClient

from runs.fronts.views import FrontViewSet
from tests import factories

SURFACES = {"api/v1/": "session", "api/public/v1/": "public"}
BODY_METHODS = ("POST", "PUT", "PATCH")
# Parameters of paths that callers choose.
CHOSEN = {"userId": "nobody", "chatKey": "nobody", "agent": "default", "threadId": "nobody"}


@dataclass(frozen=True)
class Operation:
    """A method of a path such as ``/api/v1/chats/{chatId}``."""

    surface: str
    method: str
    path: str
    action: str
    view: Any
    server_scope: str = ""

    def __str__(self) -> str:
        return f"{self.method} {self.path}"

    @property
    def relative(self) -> str:
        """The path within its surface, such as ``chats/{chatId}``."""
        return self.path.partition("/v1/")[2]

    @property
    def credential(self) -> str:
        """The name of its security scheme in the document."""
        if self.server_scope:
            return "serverKey"
        return "sessionToken" if self.surface == "session" else "apiKey"

    def client(self, user: Any) -> APIClient:
        """A client with a credential of the user, or with a server key."""
        if self.credential == "serverKey":
            return factories.server_client(self.server_scope)
        return factories.session_client(user) if self.surface == "session" else factories.public_client(user)

    @property
    def parameters(self) -> list[str]:
        """The ids of objects in its path. A caller may choose any of CHOSEN."""
        return [name for name in re.findall(r"{(\w+)}", self.path) if name not in CHOSEN]

    @property
    def scope(self) -> str:
        """The scope that a key needs. Empty if it needs none."""
        return self.server_scope or self.view.required_scopes[self.action]

    @property
    def takes_body(self) -> bool:
        return self.method in BODY_METHODS

    @property
    def is_foreign(self) -> bool:
        """Whether its body is that of another protocol, whose further members are ignored."""
        return issubclass(self.view, FrontViewSet) and "{chatKey}" not in self.path

    def url(self, ids: dict[str, str]) -> str:
        return self.path.format(**CHOSEN | ids)


def patterns(items: list[Any] | None = None, prefix: str = "") -> list[tuple[str, Any]]:
    """Return every route as (path template, callback)."""
    found: list[tuple[str, Any]] = []
    for item in get_resolver().url_patterns if items is None else items:
        path = prefix + str(item.pattern)
        if isinstance(item, URLResolver):
            found += patterns(item.url_patterns, path)
        elif isinstance(item, URLPattern):
            found.append((re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", path), item.callback))
    return found


def surface_of(path: str) -> str | None:
    return next((surface for prefix, surface in SURFACES.items() if path.startswith(prefix)), None)


def routes() -> list[tuple[str, Any]]:
    """Return the routes of both surfaces as (path template, callback)."""
    return [(path, callback) for path, callback in patterns() if surface_of(path)]


def operations(surface: str | None = None) -> list[Operation]:
    """Return the operations of the viewsets of one surface, or of both."""
    found = [
        Operation(
            str(surface_of(path)),
            method.upper(),
            f"/{path}",
            action,
            callback.cls,
            callback.cls(**callback.initkwargs).server_scope,
        )
        for path, callback in routes()
        if hasattr(callback, "actions")
        for method, action in callback.actions.items()
        if method != "head"
    ]
    return [operation for operation in found if surface in (None, operation.surface)]


def methods_of(path: str) -> set[str]:
    """Return the methods that a path supports. A path with GET also supports HEAD."""
    methods = {operation.method for operation in operations() if operation.path == path}
    return methods | ({"HEAD"} if "GET" in methods else set())
