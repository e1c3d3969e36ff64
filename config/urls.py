"""All routes of the service. The ``urls.py`` of each app lists its routes as ``session`` and ``public``."""

from django.contrib import admin
from django.urls import include, path, re_path

import apikeys.urls
import chats.urls
import credits.urls
import runs.urls
import webhooks.urls
from config.api import documentation, views
from config.staff import pages

admin.autodiscover()

# Django tries the routes in this order, so the most frequent are first.
session = [
    *runs.urls.session,
    *chats.urls.session,
    path("me", views.MeViewSet.as_view({"get": "retrieve"})),
    *credits.urls.session,
    *webhooks.urls.session,
    *apikeys.urls.session,
]
public = [*runs.urls.public, *chats.urls.public, *credits.urls.public, *apikeys.urls.public]

urlpatterns = [
    path("api/v1/", include(session)),
    path("api/public/v1/", include(public)),
    path("api/schema", views.schema(), name="schema"),
    path("api/schema/without-webhooks", views.schema(webhooks=False)),
    path("api/schema/session", views.schema(surface="/api/v1/")),
    path("api/schema/public", views.schema(surface="/api/public/v1/", webhooks=False)),
    path("api/docs", views.charged(views.docs), name="docs"),
    *runs.urls.rpc,
    re_path(r"^api(/.*)?$", views.unknown_path),
    path("admin/find/", admin.site.admin_view(pages.find), name="find"),
    *runs.urls.staff,
    path("admin/", admin.site.urls),
    path("docs", documentation.page),
    path("docs/", documentation.page),
    path("docs/<path:name>", documentation.page),
    *runs.urls.pages,
    *runs.urls.files,
    *chats.urls.uploads,
]

handler400 = views.bad_request
handler500 = views.server_error
