"""What belongs to no app in the OpenAPI document: the caller, the error's shape, the Idempotency-Key."""

from __future__ import annotations

from config.api.idempotency import KeyInUse, KeyReused
from config.api.openapi.document import Operation, Part

PART = Part(
    tags={"me": "The caller."},
    operations={
        "GET me": Operation(
            "Get the caller",
            answered={
                "id": "1",
                "username": "ada",
                "email": "ada@example.com",
                "createdAt": "2026-11-20T12:00:00.000Z",
            },
        )
    },
    components={"ApiError": "Every error has this shape.", "Me": "The user whose session token the request bears."},
    errors=(KeyReused(), KeyInUse()),
)
