from django.urls import path

from credits import views

USER = "users/<path:userId>/credits"
SERVER = {"surface": "server", "server_scope": "credits"}

session = [
    path("me/credits", views.AccountViewSet.as_view({"get": "retrieve"})),
    path("me/credits/ledger", views.LedgerViewSet.as_view({"get": "list"})),
    path("me/credits/ledger/chat/<str:chatId>", views.UsageViewSet.as_view({"get": "of_chat"})),
    path("me/credits/usage-summary", views.UsageViewSet.as_view({"get": "summary"})),
    path("me/credits/usage-entries-by-chat", views.UsageViewSet.as_view({"get": "by_chat"})),
    path(USER, views.AccountViewSet.as_view({"get": "retrieve"}, **SERVER)),
    path(f"{USER}/ledger", views.LedgerViewSet.as_view({"get": "list"}, **SERVER)),
    path(f"{USER}/usage-summary", views.UsageViewSet.as_view({"get": "summary"}, **SERVER)),
    path(f"{USER}/grants", views.GrantViewSet.as_view({"post": "create"}, **SERVER)),
    path(f"{USER}/grants/<str:ledgerId>/revoke", views.GrantViewSet.as_view({"post": "revoke"}, **SERVER)),
    path("me/credits/usage-by-day", views.UsageViewSet.as_view({"get": "by_day"})),
]
public = [path("me/credits", views.AccountViewSet.as_view({"get": "retrieve"}, surface="public"))]
