"""The base class of all viewsets: authentication, rate limit, idempotency, pagination and owner scope."""

from collections.abc import Callable
from typing import Any, ClassVar

from django.conf import settings
from django.db.models import QuerySet
from django.http import HttpResponseBase
from django.utils.module_loading import import_string
from drf_spectacular.utils import OpenApiParameter
from rest_framework.authentication import BaseAuthentication
from rest_framework.exceptions import APIException
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.viewsets import GenericViewSet

from config.api import pagination, ratelimit
from config.api.authentication import SessionTokenAuthentication, user_named
from config.api.idempotency import IdempotencyMixin
from config.api.negotiation import StrictJSONParser
from config.api.serializers import CamelSerializer, unknown_fields
from config.kernel.errors import Forbidden, NotFound, ValidationFailed
from config.kernel.ids import is_plausible_id
from config.limits.window import Bucket

BODY_METHODS = {"POST", "PUT", "PATCH"}
# Requests per minute of a server key, for each of its scopes.
SERVER_KEY_REQUESTS = 600
# Clients send these to every list. A list that is one page does not declare them.
PAGE_PARAMETERS = {"limit", "cursor"}


def find(rows: QuerySet, key: str) -> Any:
    """The row with this id. Raises NotFound."""
    found = rows.filter(pk=key).first() if is_plausible_id(key) else None
    if found is None:
        raise NotFound
    return found


class ServiceViewSet(IdempotencyMixin, GenericViewSet):
    """``queryset_for`` gives the caller's own rows, so a forgotten check is a 404. ``surface`` is "session" (/api/v1,
    session tokens), "public" (/api/public/v1, API keys) or "server" (/api/v1 with a server key of the app's backend,
    with one scope for the whole route). A viewset of several surfaces gets it from its route.
    """

    surface = "session"
    # The scope that an API key needs, by action; a public viewset names each of its actions. Empty: no scope.
    required_scopes: ClassVar[dict[str, str]] = {}
    server_scope = ""
    # The actions that also count against the limit of run starts.
    throttle_run_starts: ClassVar[frozenset[str]] = frozenset()
    # The query parameters of an action, for the OpenAPI document too. A list also takes those of its pages.
    query_parameters: ClassVar[dict[str, list[OpenApiParameter]]] = {}
    pagination_class = pagination.KeysetPagination
    # The result of ``find_with_user``.
    found: Any = None
    http_method_names = ["get", "head", "post", "put", "patch", "delete"]
    # For the OpenAPI document: an action's further statuses. A negative one removes a usual status.
    error_statuses: ClassVar[dict[str, set[int]]] = {}

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Authentication, rate limit and permission come first: the body of a refused request is not read."""
        self.format_kwarg = None
        self.perform_authentication(request)
        self.check_throttles(request)
        request.accepted_renderer, request.accepted_media_type = self.perform_content_negotiation(request)
        self.check_permissions(request)
        handled = request.method is not None and request.method.lower() in getattr(self, "action_map", {})
        if handled and request.query_params:
            self.check_query(request)
        if handled and request.method in BODY_METHODS and StrictJSONParser in self.parser_classes:
            request._request.body  # noqa: B018  (413)
            request.data  # noqa: B018  (400 and 415 also for actions that need no body)
            self.apply_idempotency(request)

    def perform_authentication(self, request: Request) -> None:
        try:
            super().perform_authentication(request)
        except APIException:
            ratelimit.refuse_if_over(ratelimit.charge_address(request._request))
            raise

    def get_authenticators(self) -> list[BaseAuthentication]:
        if self.surface == "session":
            return [SessionTokenAuthentication(self.find_user)]
        return [import_string(settings.KEY_AUTHENTICATION[self.surface])()]

    def find_user(self, username: str) -> Any:
        self.found = self.find_with_user(username)
        return user_named.first(username) if self.found is None else self.found.user

    def find_with_user(self, username: str) -> Any:
        """The row that the request is about, read together with this user, its owner. None: only the user is read."""
        return None

    def check_throttles(self, request: Request) -> None:
        if self.surface == "server":
            buckets = [Bucket(f"server-key:{self.server_scope}:{request.auth.pk}", SERVER_KEY_REQUESTS)]
        else:
            buckets = [ratelimit.requests_of(self.surface, request.user)]
        if self.action in self.throttle_run_starts:
            buckets.append(ratelimit.run_starts_of(self.surface, request.user))
        ratelimit.charge_caller(request._request, *buckets)

    def check_permissions(self, request: Request) -> None:
        super().check_permissions(request)
        # A path that does not have this method is 405, whatever scopes the key has.
        if self.surface != "session" and self.action in self.action_map.values() and (scope := self.required_scope()):
            self.require_scope(scope)

    def require_scope(self, scope: str) -> None:
        """Raises Forbidden if the credential lacks the scope."""
        if not self.has_scope(scope):
            raise Forbidden(f"This operation needs the scope {scope}.", details={"requiredScope": scope})

    def check_query(self, request: Request) -> None:
        """An unknown query parameter or choice is 400: a misspelt filter must not be no filter."""
        query, declared = request.query_params, {each.name: each for each in self.query_parameters.get(self.action, ())}
        known = {*declared, *(PAGE_PARAMETERS if self.action == "list" else ())}
        # Each pair of an object is a parameter: NAME.KEY=VALUE.
        shapes = {name: each.type for name, each in declared.items()}
        objects = [name for name, shape in shapes.items() if isinstance(shape, dict) and shape["type"] == "object"]
        known |= {name for name in query if name.partition(".")[0] in objects}
        problems = unknown_fields(query, known)
        for name, each in declared.items():
            if each.enum and query.get(name, each.enum[0]) not in each.enum:
                problems[name] = [f"Use one of {', '.join(map(str, each.enum))}."]
        if problems:
            raise ValidationFailed(problems)

    def required_scope(self) -> str:
        """The scope that the key of this request must have; empty for a session token."""
        if self.surface == "public":
            return self.required_scopes[self.action]
        return self.server_scope if self.surface == "server" else ""

    def has_scope(self, scope: str) -> bool:
        """Scopes limit keys only."""
        key: Any = self.request.auth
        return self.surface == "session" or scope in key.scopes

    def queryset_for(self, user: Any) -> QuerySet:
        raise NotImplementedError(f"{type(self).__name__} lists nothing")

    def get_queryset(self) -> QuerySet:
        if getattr(self, "swagger_fake_view", False):
            return self.queryset_for(None).none()
        return self.queryset_for(self.request.user)

    def get_object(self) -> Any:
        """The caller's object that the path names; anything else is 404."""
        return find(self.get_queryset(), self.kwargs[self.lookup_url_kwarg or self.lookup_field])

    def read(self, serializer_class: type[CamelSerializer]) -> dict[str, Any]:
        """The validated body; 400 with every field's messages otherwise."""
        return serializer_class.validated(self.request.data or {})

    def page(self, rows: QuerySet, show: Callable[[Any], Any] | None = None, **how: Any) -> Response:
        """The answer with the requested page of ``rows``; ``how`` as for ``pagination.page``."""
        show = show or self.get_serializer().to_representation
        return Response(pagination.page(rows, self.request.query_params, show, **how))

    def show(self, row: Any, status: int = 200) -> Response:
        return Response(self.get_serializer(row).data, status)

    # No docstrings: the OpenAPI document would quote them.
    def list(self, request: Request, *args: Any, **kwargs: Any) -> HttpResponseBase:
        return self.page(self.get_queryset())

    def retrieve(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        return self.show(self.get_object())
