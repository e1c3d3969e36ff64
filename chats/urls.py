from typing import Any

from django.urls import URLPattern, path

from chats import views
from config.api.negotiation import AnyMediaType


def routes(surface: str) -> list[URLPattern]:
    on: dict[str, Any] = {"surface": surface}
    chat: dict[str, Any] = {"get": "retrieve", "patch": "partial_update", "delete": "destroy"}
    attachments = views.AttachmentViewSet
    return [
        path("chats", views.ChatViewSet.as_view({"get": "list", "post": "create"}, **on)),
        path("chats/<str:chatId>", views.ChatViewSet.as_view(chat, **on)),
        path("chats/<str:chatId>/messages", views.ChatMessageViewSet.as_view({"get": "list"}, **on)),
        path("messages/<str:messageId>", views.MessageViewSet.as_view({"get": "retrieve"}, **on)),
        path("attachments", attachments.as_view({"post": "create"}, **on)),
        path("attachments/<str:attachmentId>", attachments.as_view({"get": "retrieve"}, **on)),
        path("attachments/<str:attachmentId>/complete", attachments.as_view({"post": "complete"}, **on)),
        path(
            "attachments/<str:attachmentId>/content",
            attachments.as_view({"get": "content"}, content_negotiation_class=AnyMediaType, **on),
        ),
    ]


session, public = routes("session"), routes("public")
uploads = [path("uploads/<str:token>", views.receive_upload, name="upload")]
