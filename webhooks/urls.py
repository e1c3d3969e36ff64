from typing import Any

from django.urls import path

from webhooks import views

ENDPOINT: dict[str, Any] = {"get": "retrieve", "post": "create", "patch": "partial_update", "delete": "destroy"}

session = [
    path("webhooks", views.WebhookViewSet.as_view(ENDPOINT)),
    path("webhooks/test", views.WebhookViewSet.as_view({"post": "test"})),
    path("webhooks/deliveries", views.DeliveryViewSet.as_view({"get": "list"})),
]
