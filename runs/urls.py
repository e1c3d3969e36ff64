from django.contrib import admin
from django.urls import URLPattern, path

from runs import views
from runs.admin import person, reports
from runs.catalogue.serializers import AgentSerializer, ModelSerializer, ToolSerializer
from runs.fronts.ag_ui.views import AgUiViewSet
from runs.fronts.ai_sdk.views import AiSdkViewSet
from runs.mcp.views import McpViewSet
from runs.pages import receive_callback, serve_file, show_front, show_playground
from runs.streams.views import StreamViewSet


def routes(surface: str) -> list[URLPattern]:
    on = {"surface": surface}
    runs, waitpoints, calls = views.RunViewSet, views.WaitpointViewSet, views.ToolInvocationViewSet
    listed = views.CatalogueViewSet
    return [
        path("runs", runs.as_view({"get": "list"}, **on)),
        path("runs/<str:runId>", runs.as_view({"get": "retrieve"}, **on)),
        path("runs/<str:runId>/cancel", runs.as_view({"post": "cancel"}, **on)),
        path("runs/<str:runId>/turns", views.TurnViewSet.as_view({"get": "list"}, **on)),
        path("runs/<str:runId>/stream", StreamViewSet.as_view({"get": "stream"}, **on)),
        path("chats/<str:chatId>/runs", views.ChatRunViewSet.as_view({"get": "list", "post": "create"}, **on)),
        path("waitpoints/<str:waitpointId>", waitpoints.as_view({"get": "retrieve"}, **on)),
        path("waitpoints/<str:waitpointId>/respond", waitpoints.as_view({"post": "respond"}, **on)),
        path("tool-invocations/<str:toolInvocationId>", calls.as_view({"get": "retrieve"}, **on)),
        path("tool-invocations/<str:toolInvocationId>/result", calls.as_view({"post": "submit"}, **on)),
        path("models", listed.as_view({"get": "list"}, rows="models", serializer_class=ModelSerializer, **on)),
        path("agents", listed.as_view({"get": "list"}, rows="agents", serializer_class=AgentSerializer, **on)),
        path("tools", listed.as_view({"get": "list"}, rows="tools", serializer_class=ToolSerializer, **on)),
        path("ai-sdk/chat", AiSdkViewSet.as_view({"post": "create"}, **on)),
        path("ai-sdk/chat/<path:chatKey>/stream", AiSdkViewSet.as_view({"get": "stream"}, **on)),
        path("ai-sdk/chat/<path:chatKey>/messages", AiSdkViewSet.as_view({"get": "messages"}, **on)),
        path("ai-sdk/chat/<path:chatKey>/stop", AiSdkViewSet.as_view({"post": "stop"}, **on)),
        path("ag-ui/agents/<str:agent>", AgUiViewSet.as_view({"post": "run"}, **on)),
        path("copilotkit/info", AgUiViewSet.as_view({"get": "info"}, **on)),
        path("copilotkit/agent/<str:agent>/run", AgUiViewSet.as_view({"post": "run"}, **on)),
        path("copilotkit/agent/<str:agent>/connect", AgUiViewSet.as_view({"post": "connect"}, **on)),
        path("copilotkit/agent/<str:agent>/stop/<path:threadId>", AgUiViewSet.as_view({"post": "stop"}, **on)),
    ]


session, public = routes("session"), routes("public")
pages = [path("", show_front), path("playground", show_playground), path("playground/<str:chatId>", show_playground)]
staff = [
    path("admin/people/<int:user_id>/", admin.site.admin_view(person.show), name="person"),
    path("admin/reports/", admin.site.admin_view(reports.show), name="reports"),
]
files = [path("files/<str:invocation_id>/<str:token>/<str:file_name>", serve_file)]
rpc = [path("api/mcp", McpViewSet.as_view({"post": "handle"})), path("api/callbacks/<str:token>", receive_callback)]
