"""Routes of credits."""

from django.urls import path

from credits import views

session = [
    path("me/credits", views.AccountViewSet.as_view({"get": "retrieve"})),
    path("me/credits/ledger", views.LedgerViewSet.as_view({"get": "list"})),
    path("me/credits/ledger/chat/<str:chatId>", views.UsageViewSet.as_view({"get": "of_chat"})),
    path("me/credits/usage-summary", views.UsageViewSet.as_view({"get": "summary"})),
    path("me/credits/usage-entries-by-chat", views.UsageViewSet.as_view({"get": "by_chat"})),
    path("me/credits/usage-by-day", views.UsageViewSet.as_view({"get": "by_day"})),
]
public = [path("me/credits", views.AccountViewSet.as_view({"get": "retrieve"}, surface="public"))]
