"""What belongs to no app in the OpenAPI document: the caller, the error's shape, the Idempotency-Key."""

from __future__ import annotations

from config.api.idempotency import KeyInUse, KeyReused
from config.api.openapi.document import Operation, Part

PART = Part(
    tags={"me": "The caller."},
    operations={
        "GET me": Operation(
            "Get the caller",
            "The user whose session token the request bears. The first valid token of a user creates the user.",
            answered={
                "id": "1",
                "username": "ada",
                "email": "ada@example.com",
                "createdAt": "2026-11-20T12:00:00.000Z",
            },
        )
    },
    fields={
        "id": "Its id.",
        "chatId": "The id of the chat.",
        "runId": "The id of the run.",
        "createdAt": "When it was created.",
        "updatedAt": "When it last changed.",
    },
    components={
        "ApiError": "Every error has this shape.",
        "Me": "The user whose session token the request bears.",
        "NullEnum": "No value.",
    },
    errors=(KeyReused(), KeyInUse()),
)
