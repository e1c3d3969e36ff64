"""Runs, waitpoints and the catalogue. ``runs.urls`` serves each class on both surfaces."""

from __future__ import annotations

from typing import Any

from drf_spectacular.utils import OpenApiParameter, PolymorphicProxySerializer, extend_schema
from rest_framework import status
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request
from rest_framework.response import Response

from chats.services import chats_of
from config.api.pagination import KeysetPagination
from config.api.viewsets import ServiceViewSet
from config.kernel.errors import NotFound, ValidationFailed
from config.kernel.ids import is_plausible_id
from config.telemetry import logs
from runs import catalogue, services
from runs.models import Run, RunStatus, Waitpoint
from runs.serializers import (
    ANSWERS,
    ModelSerializer,
    RunInput,
    RunSerializer,
    RunSummarySerializer,
    ToolSerializer,
    WaitpointSerializer,
)

WAITPOINT_ANSWER = PolymorphicProxySerializer(
    "WaitpointAnswer", {str(kind): answer for kind, answer in ANSWERS.items()}, resource_type_field_name="kind"
)
STATUS_FILTER = OpenApiParameter("status", enum=RunStatus.values, description="Only runs in this status.")


class RunActions(ServiceViewSet):
    """A list holds summaries, whose size does not grow with the runs."""

    def get_serializer_class(self) -> Any:
        return RunSummarySerializer if self.action == "list" else RunSerializer


class RunViewSet(RunActions):
    lookup_url_kwarg = "runId"
    required_scopes = {"list": "runs:read", "retrieve": "runs:read", "cancel": "runs:write"}
    idempotent_actions = frozenset({"cancel"})

    def queryset_for(self, user: Any) -> Any:
        return services.summaries_of(user)

    @extend_schema(parameters=[STATUS_FILTER], responses=RunSummarySerializer(many=True))
    def list(self, request: Request) -> Response:
        runs = self.get_queryset()
        wanted = request.query_params.get("status")
        if wanted is not None:
            if wanted not in RunStatus.values:
                raise ValidationFailed({"status": [f"Use one of {', '.join(RunStatus.values)}."]})
            runs = runs.filter(status=wanted)
        return self.page(runs)

    def get_object(self) -> Run:
        run_id = self.kwargs["runId"]
        found = services.find_run(self.request.user.pk or 0, run_id) if is_plausible_id(run_id) else None
        if found is None:
            raise NotFound
        return found

    @extend_schema(request=None, responses=RunSerializer)
    def cancel(self, request: Request, runId: str) -> Response:
        return self.show(services.cancel_run(self.get_object()))


class ChatRunViewSet(RunActions):
    lookup_url_kwarg = "chatId"
    required_scopes = {"list": "runs:read", "create": "runs:write"}
    throttle_run_starts = frozenset({"create"})
    error_statuses = {"create": {402}}

    def queryset_for(self, user: Any) -> Any:
        return chats_of(user)

    @extend_schema(responses=RunSummarySerializer(many=True))
    def list(self, request: Request, chatId: str) -> Response:
        return self.page(services.summaries_of(request.user).filter(chat=self.get_object()))

    @extend_schema(request=RunInput, responses={201: RunSerializer})
    def create(self, request: Request, chatId: str) -> Response:
        try:
            body = self.read(RunInput)
        except ValidationError:
            self.get_object()  # with any body, a chat of another user is 404
            raise
        run = services.start_run(request.user, chatId, request_id=logs.request_id.get() or "", **body)
        return self.show(services.as_new(run), status.HTTP_201_CREATED)


class WaitpointViewSet(ServiceViewSet):
    serializer_class = WaitpointSerializer
    lookup_url_kwarg = "waitpointId"
    required_scopes = {"retrieve": "runs:read", "respond": "waitpoints:respond"}

    def queryset_for(self, user: Any) -> Any:
        return services.waitpoints_of(user)

    def get_object(self) -> Waitpoint:
        waitpoint: Waitpoint = super().get_object()
        logs.run_id.set(waitpoint.run_id)
        return waitpoint

    @extend_schema(request=WAITPOINT_ANSWER, responses=WaitpointSerializer)
    def respond(self, request: Request, waitpointId: str) -> Response:
        body: Any = request.data or {}
        return self.show(services.respond(self.get_object(), body))


class WholeCatalogue(KeysetPagination):
    """All rows as one page."""

    def get_schema_operation_parameters(self, view: Any) -> list[dict[str, Any]]:
        return []


class CatalogueActions(ServiceViewSet):
    """The whole catalogue as one page."""

    required_scopes = {"list": "runs:read"}
    pagination_class = WholeCatalogue
    error_statuses = {"list": {-400}}

    def queryset_for(self, user: Any) -> Any:
        return Run.objects.none()

    def answer(self, rows: Any) -> Response:
        return Response({"items": self.get_serializer_class()(rows, many=True).data, "nextCursor": None})


class ModelViewSet(CatalogueActions):
    serializer_class = ModelSerializer

    @extend_schema(responses=ModelSerializer(many=True))
    def list(self, request: Request) -> Response:
        return self.answer(catalogue.read().models.values())


class ToolViewSet(CatalogueActions):
    serializer_class = ToolSerializer

    @extend_schema(responses=ToolSerializer(many=True))
    def list(self, request: Request) -> Response:
        return self.answer(catalogue.read().tools.values())
