from django.urls import URLPattern, path

from chats import views
from chats.uploads import receive_upload
from config.api.viewsets import ServiceViewSet


def routes(
    chats: type[ServiceViewSet],
    messages: type[ServiceViewSet],
    attachments: type[ServiceViewSet],
    contents: type[ServiceViewSet],
) -> list[URLPattern]:
    """The same paths for both surfaces."""
    item = chats.as_view({"get": "retrieve", "patch": "partial_update", "delete": "destroy"})
    return [
        path("chats", chats.as_view({"get": "list", "post": "create"})),
        path("chats/<str:chatId>", item),
        path("chats/<str:chatId>/messages", messages.as_view({"get": "list"})),
        path("attachments", attachments.as_view({"post": "create"})),
        path("attachments/<str:attachmentId>", attachments.as_view({"get": "retrieve"})),
        path("attachments/<str:attachmentId>/complete", attachments.as_view({"post": "complete"})),
        path("attachments/<str:attachmentId>/content", contents.as_view({"get": "content"})),
    ]


session = routes(
    views.SessionChatViewSet,
    views.SessionMessageViewSet,
    views.SessionAttachmentViewSet,
    views.SessionAttachmentContentViewSet,
)
public = routes(
    views.PublicChatViewSet,
    views.PublicMessageViewSet,
    views.PublicAttachmentViewSet,
    views.PublicAttachmentContentViewSet,
)
uploads = [path("uploads/<str:token>", receive_upload, name="upload")]
