"""Runs, waitpoints and the catalogue. ``runs.urls`` serves each class on both surfaces."""

from typing import Any

from django.db.models import QuerySet
from drf_spectacular.utils import PolymorphicProxySerializer, extend_schema
from rest_framework import status
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request
from rest_framework.response import Response

from chats.models import Chat
from chats.services import chats_of
from config.api.pagination import KeysetPagination
from config.api.serializers import NoInput
from config.api.viewsets import ServiceViewSet
from config.kernel.errors import NotFound
from config.kernel.ids import is_plausible_id
from config.kernel.jsontext import dumps, from_text
from config.telemetry import logs
from runs import catalogue, serializers, services
from runs.calls import ANSWERS, CallResultInput, ToolInvocationSerializer, WaitpointSerializer, invocation_without_text
from runs.filters import PARAMETERS, filtered, limited
from runs.models import Run
from runs.tools.schema import one_check_of

WAITPOINT_ANSWER = PolymorphicProxySerializer(
    "WaitpointAnswer", {str(kind): answer for kind, answer in ANSWERS.items()}, resource_type_field_name="kind"
)


class RunActions(ServiceViewSet):
    """A list holds summaries, whose size does not grow with the runs."""

    query_parameters = {"list": PARAMETERS}

    def get_serializer_class(self) -> Any:
        return serializers.RunSummarySerializer if self.action == "list" else serializers.RunSerializer

    def filtered_page(self, runs: QuerySet[Run]) -> Response:
        query = self.request.query_params
        with limited(query):
            return self.page(filtered(runs, query, self.request.user.pk or 0))


class RunViewSet(RunActions):
    lookup_url_kwarg = "runId"
    required_scopes = {"list": "runs:read", "retrieve": "runs:read", "cancel": "runs:write"}
    idempotent_actions = frozenset({"cancel"})

    queryset_for = staticmethod(services.summaries_of)

    def list(self, request: Request) -> Response:
        return self.filtered_page(self.get_queryset())

    def find_with_user(self, username: str) -> Run | None:
        return services.find_run_with_user(username, self.kwargs["runId"]) if self.action == "retrieve" else None

    def get_object(self) -> Run:
        found = self.found or services.find_run(self.request.user.pk or 0, self.kwargs["runId"])
        if found is None:
            raise NotFound
        return found

    @extend_schema(request=None)
    def cancel(self, request: Request, runId: str) -> Response:
        found = self.get_object()
        self.read(NoInput)
        run = self.get_serializer(services.cancel_run(found)).data
        return Response(run if self.has_scope("runs:read") else serializers.run_without_text(run))

    def replayed_answer(self, stored: bytes) -> bytes:
        self.get_object()  # 404 once the chat is deleted: the answer holds text
        return stored if self.has_scope("runs:read") else dumps(serializers.run_without_text(from_text(stored)))


class ChatRunViewSet(RunActions):
    lookup_url_kwarg = "chatId"
    required_scopes = {"list": "runs:read", "create": "runs:write"}
    throttle_run_starts = frozenset({"create"})
    error_statuses = {"create": {402}}

    def find_with_user(self, username: str) -> Chat | None:
        is_start = self.action == "create" and is_plausible_id(self.kwargs["chatId"])
        return services.chat_with_user.first(username, self.kwargs["chatId"]) if is_start else None

    queryset_for = staticmethod(chats_of)

    def list(self, request: Request, chatId: str) -> Response:
        return self.filtered_page(services.summaries_of(request.user).filter(chat=self.get_object()))

    def prepare(self) -> None:
        if self.action != "create":
            return
        try:
            with one_check_of(self.request.user.pk or 0, self.request.data):
                self.body = self.read(serializers.RunInput)
        except ValidationError:
            self.get_object()  # with any body, a chat of another user is 404
            raise

    @extend_schema(request=serializers.RunInput)
    def create(self, request: Request, chatId: str) -> Response:
        services.require_allowed(self.surface, self.body)
        run = services.start_run(request.user, chatId, self.found, request_id=logs.request_id.get() or "", **self.body)
        return self.show(run, status.HTTP_201_CREATED)


class WaitpointViewSet(ServiceViewSet):
    serializer_class = WaitpointSerializer
    lookup_url_kwarg = "waitpointId"
    required_scopes = {"retrieve": "runs:read", "respond": "waitpoints:respond"}

    queryset_for = staticmethod(services.waitpoints_of)

    @extend_schema(request=WAITPOINT_ANSWER)
    def respond(self, request: Request, waitpointId: str) -> Response:
        waitpoint = self.get_serializer(services.respond(self.get_object(), request.data or {})).data
        return Response(waitpoint if self.has_scope("runs:read") else serializers.waitpoint_without_text(waitpoint))


class ToolInvocationViewSet(ServiceViewSet):
    serializer_class = ToolInvocationSerializer
    lookup_url_kwarg = "toolInvocationId"
    required_scopes = {"retrieve": "runs:read", "submit": "runs:write"}
    error_statuses = {"submit": {409}}

    queryset_for = staticmethod(services.invocations_of)

    @extend_schema(request=CallResultInput)
    def submit(self, request: Request, toolInvocationId: str) -> Response:
        call = self.get_serializer(services.submit_result(self.get_object(), request.data or {})).data
        return Response(call if self.has_scope("runs:read") else invocation_without_text(call))


class OnePage(KeysetPagination):
    """All rows as one page."""

    def get_schema_operation_parameters(self, view: Any) -> list[dict[str, Any]]:
        return []


class OnePageViewSet(ServiceViewSet):
    required_scopes = {"list": "runs:read"}
    pagination_class = OnePage

    def queryset_for(self, user: Any) -> Any:
        return Run.objects.none()

    def one_page(self, rows: Any) -> Response:
        return Response({"items": self.get_serializer(rows, many=True).data, "nextCursor": None})


class TurnViewSet(OnePageViewSet):
    tag = "runs"
    serializer_class = serializers.TurnSerializer

    def list(self, request: Request, runId: str) -> Response:
        return self.one_page(services.turns_of(request.user.pk or 0, runId))


class CatalogueViewSet(OnePageViewSet):
    """A part of the catalogue: its route gives the name of the part, and the serializer."""

    rows = ""

    def list(self, request: Request) -> Response:
        return self.one_page(getattr(catalogue.read(), self.rows).values())
