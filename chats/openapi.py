"""Chats and attachments in the OpenAPI document."""

from __future__ import annotations

from chats.downloads import RangeNotSatisfiable
from config.api.openapi.document import Operation, Part

CHAT_ID = "chat_01kb5w3tzp2q3r4s5t6v7w8x9y"
MESSAGE_ID = "msg_01kb5w3v1b2c3d4e5f6g7h8j9k"
RUN_ID = "run_01kb5w3v1c4d5e6f7g8h9j0k1m"
CHAT = {
    "id": CHAT_ID,
    "title": "Sales of the third quarter",
    "activeRunId": None,
    "createdAt": "2026-11-20T12:34:50.120Z",
    "updatedAt": "2026-11-20T12:34:50.120Z",
}
MESSAGE = {
    "id": MESSAGE_ID,
    "chatId": CHAT_ID,
    "runId": RUN_ID,
    "role": "user",
    "content": "Draw our sales.",
    "attachments": [],
    "createdAt": "2026-11-20T12:34:56.740Z",
    "updatedAt": "2026-11-20T12:34:56.740Z",
}
PART = Part(
    tags={
        "chats": "Chats, and the messages and runs in them.",
        "attachments": "Files for messages: announced, uploaded, completed.",
    },
    operations={
        "POST chats": Operation(
            "Create a chat",
            "Creates a chat, in which runs can be started.",
            sent={"title": "Sales of the third quarter"},
            answered=CHAT,
        ),
        "GET chats": Operation(
            "List chats", "The caller's chats, newest first.", answered={"items": [CHAT], "nextCursor": None}
        ),
        "GET chats/{chatId}": Operation("Get a chat", "A chat, with the run that is active in it now.", answered=CHAT),
        "PATCH chats/{chatId}": Operation(
            "Rename a chat",
            "Changes the title of a chat.",
            sent={"title": "Sales"},
            answered=CHAT | {"title": "Sales", "updatedAt": "2026-11-20T12:40:00.000Z"},
        ),
        "DELETE chats/{chatId}": Operation(
            "Delete a chat",
            "Cancels the chat's runs, and hides the chat with its messages, runs and files at once. Ledger rows stay.",
        ),
        "GET chats/{chatId}/messages": Operation(
            "List a chat's messages",
            "The messages of a chat, oldest first.",
            answered={"items": [MESSAGE], "nextCursor": None},
        ),
        "GET messages/{messageId}": Operation(
            "Get a message",
            "A message of a user or of the agent. The agent's content grows while its run executes.",
            answered=MESSAGE,
        ),
        "POST attachments": Operation("Announce a file"),
        "GET attachments/{attachmentId}": Operation("Get an attachment", "An attachment, with its status."),
        "POST attachments/{attachmentId}/complete": Operation("Complete an upload"),
        "GET attachments/{attachmentId}/content": Operation("Download a file"),
    },
    components={
        "Attachment": "A file for a message.",
        "AttachmentInputRequest": "A file that will be uploaded.",
        "AttachmentStatusEnum": "Where an attachment is. Only a completed one can be used in a message.",
        "Chat": "Groups messages and runs. At most one of its runs is active at a time.",
        "ChatChangesRequest": "The fields of a chat that change.",
        "ChatInputRequest": "A new chat.",
        "CreatedAttachment": "A new attachment, with the request that uploads its file.",
        "Message": "A user's message or an agent's answer.",
        "MessageRoleEnum": "Who wrote a message.",
        "Upload": "Where the file goes: one request, the raw bytes as its body, with these headers and no bearer "
        "token.",
        "UploadMethodEnum": "The method of the request that uploads a file.",
    },
    errors=(RangeNotSatisfiable(0),),
)
