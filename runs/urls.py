from django.urls import path

from config.api.viewsets import ServiceViewSet
from runs import playground, views
from runs.mcp import views as mcp_views
from runs.streams import views as stream_views
from runs.tools.files import serve_file


def routes(
    runs: type[ServiceViewSet],
    chat_runs: type[ServiceViewSet],
    waitpoints: type[ServiceViewSet],
    models: type[ServiceViewSet],
    tools: type[ServiceViewSet],
    streams: type[ServiceViewSet],
) -> list:
    """The same paths for both surfaces."""
    return [
        path("runs", runs.as_view({"get": "list"})),
        path("runs/<str:runId>", runs.as_view({"get": "retrieve"})),
        path("runs/<str:runId>/cancel", runs.as_view({"post": "cancel"})),
        path("runs/<str:runId>/stream", streams.as_view({"get": "stream"})),
        path("chats/<str:chatId>/runs", chat_runs.as_view({"get": "list", "post": "create"})),
        path("waitpoints/<str:waitpointId>", waitpoints.as_view({"get": "retrieve"})),
        path("waitpoints/<str:waitpointId>/respond", waitpoints.as_view({"post": "respond"})),
        path("models", models.as_view({"get": "list"})),
        path("tools", tools.as_view({"get": "list"})),
    ]


session = routes(
    views.SessionRunViewSet,
    views.SessionChatRunViewSet,
    views.SessionWaitpointViewSet,
    views.SessionModelViewSet,
    views.SessionToolViewSet,
    stream_views.SessionStreamViewSet,
)
public = routes(
    views.PublicRunViewSet,
    views.PublicChatRunViewSet,
    views.PublicWaitpointViewSet,
    views.PublicModelViewSet,
    views.PublicToolViewSet,
    stream_views.PublicStreamViewSet,
)
pages = [path("playground", playground.show)]
files = [path("files/<str:token>/<str:file_name>", serve_file)]
rpc = [path("api/mcp", mcp_views.McpViewSet.as_view({"post": "handle"}))]
