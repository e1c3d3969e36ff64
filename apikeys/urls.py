from django.urls import path

from apikeys import views

session = [
    path("session-tokens", views.SessionTokenViewSet.as_view({"post": "create"})),
    path("api-keys", views.ApiKeyViewSet.as_view({"post": "create", "get": "list"})),
    path("api-keys/<str:keyId>", views.ApiKeyViewSet.as_view({"delete": "destroy"})),
]
public = [path("key", views.OwnKeyViewSet.as_view({"get": "retrieve"}))]
