"""The caller's webhook endpoint and its deliveries: session surface only."""

from typing import Any

from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from config.api import ratelimit
from config.api.serializers import NoInput
from config.api.viewsets import ServiceViewSet
from config.limits.window import Bucket
from webhooks import services
from webhooks.models import Delivery
from webhooks.serializers import DeliverySerializer, EndpointChanges, EndpointInput, EndpointSerializer

TESTS_PER_MINUTE = 10
STATUS = OpenApiParameter("status", enum=Delivery.Status.values, description="Only deliveries with this status.")


class WebhookViewSet(ServiceViewSet):
    serializer_class = EndpointSerializer
    idempotent_actions = {"create", "test"}
    error_statuses = {"retrieve": {404}, "partial_update": {404}, "destroy": {404}, "test": {404, 409}}

    def prepare(self) -> None:
        if self.action == "create":
            self.body = self.read(EndpointInput)

    @extend_schema(request=EndpointInput, responses={200: EndpointSerializer})
    def create(self, request: Request) -> Response:
        endpoint, reveal = services.register(
            request.user, self.body["url"], rotate=self.body["rotate_secret"], extended=self.body.get("extended_events")
        )
        # Only an answer that shows a secret is not stored.
        self.secret_actions = {"create"} if reveal else frozenset()  # type: ignore[misc]
        return Response(EndpointSerializer(endpoint, context={"reveal": reveal}).data)

    def retrieve(self, request: Request) -> Response:
        return self.show(services.endpoint_of(request.user))

    @extend_schema(request=EndpointChanges)
    def partial_update(self, request: Request) -> Response:
        services.endpoint_of(request.user)  # without an endpoint, any body is 404
        return self.show(services.change(request.user, **self.read(EndpointChanges)))

    def destroy(self, request: Request) -> Response:
        services.delete_endpoint(request.user)
        return Response(status=204)

    @extend_schema(request=None, responses={201: DeliverySerializer})
    def test(self, request: Request) -> Response:
        ratelimit.charge_caller(request._request, Bucket(f"webhook-tests:{request.user.pk}", TESTS_PER_MINUTE))
        services.endpoint_of(request.user)
        self.read(NoInput)
        return Response(DeliverySerializer(services.send_test(request.user)).data, 201)


class DeliveryViewSet(ServiceViewSet):
    serializer_class = DeliverySerializer
    query_parameters = {"list": [STATUS]}

    def queryset_for(self, user: Any) -> Any:
        """The user's deliveries, also those to deleted endpoints."""
        found = Delivery.objects.filter(user=user).defer("body").prefetch_related("attempts")
        status = self.request.query_params.get("status")
        return found.filter(status=status) if status else found
