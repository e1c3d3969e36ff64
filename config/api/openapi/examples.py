"""Examples of the OpenAPI document, one story told through them; a test holds each to its schema."""

from __future__ import annotations

from typing import Any

# Status → its codes, each with a message of its own or the status's.
ERROR_CODES: dict[int, dict[str, str]] = {
    400: {"VALIDATION_ERROR": ""},
    401: {"UNAUTHORIZED": ""},
    402: {"INSUFFICIENT_CREDITS": "The available credits do not suffice: 0."},
    403: {"FORBIDDEN": "This operation needs the scope runs:write."},
    404: {"NOT_FOUND": ""},
    406: {"NOT_ACCEPTABLE": ""},
    409: {
        "CONFLICT": "The request conflicts with the current state.",
        "RUN_IN_PROGRESS": "The chat has a run in progress; wait for it, cancel it, or enqueue behind it.",
        "IDEMPOTENCY_KEY_REUSED": "This Idempotency-Key was used for another request.",
        "IDEMPOTENCY_KEY_IN_USE": "The first request with this Idempotency-Key is not finished yet.",
    },
    413: {"PAYLOAD_TOO_LARGE": ""},
    415: {"UNSUPPORTED_MEDIA_TYPE": ""},
    416: {"REQUESTED_RANGE_NOT_SATISFIABLE": "The file has no such bytes."},
    429: {"RATE_LIMITED": ""},
    500: {"INTERNAL_ERROR": ""},
    503: {"UNAVAILABLE": ""},
}
ERROR_DETAILS: dict[str, Any] = {
    "VALIDATION_ERROR": {"fields": {"message": ["This field is required."]}},
    "INSUFFICIENT_CREDITS": {"available": "0"},
    "FORBIDDEN": {"requiredScope": "runs:write"},
}

CHAT_ID = "chat_01kb5w3tzp2q3r4s5t6v7w8x9y"
RUN_ID = "run_01kb5w3v1c4d5e6f7g8h9j0k1m"
MESSAGE_ID = "msg_01kb5w3v1b2c3d4e5f6g7h8j9k"
ANSWER_ID = "msg_01kb5w3v3n4p5q6r7s8t9v0w1x"
CALL_ID = "inv_01kb5w3v4z5a6b7c8d9e0f1g2h"
WAITPOINT_ID = "wp_01kb5w3v5j6k7m8n9p0q1r2s3t"
EVENT_ID = "evt_01kb5w3v2m8x4c9z6t7q0r1s2d"

CHAT = {
    "id": CHAT_ID,
    "title": "Sales of the third quarter",
    "activeRunId": None,
    "createdAt": "2026-11-20T12:34:50.120Z",
    "updatedAt": "2026-11-20T12:34:50.120Z",
}
STARTED: dict[str, Any] = {
    "id": RUN_ID,
    "chatId": CHAT_ID,
    "status": "queued",
    "userMessageId": MESSAGE_ID,
    "assistantMessageId": None,
    "lastStreamIndex": 1,
    "cancelRequestedAt": None,
    "requestedModel": None,
    "resolvedModel": None,
    "errorCode": None,
    "errorMessage": None,
    "createdAt": "2026-11-20T12:34:56.740Z",
    "updatedAt": "2026-11-20T12:34:56.740Z",
    "startedAt": None,
    "finishedAt": None,
    "toolInvocations": [],
    "totalCreditsUsed": 0,
    "pendingWaitpoint": None,
}
CALL = {
    "id": CALL_ID,
    "agentRunId": RUN_ID,
    "turnIndex": 1,
    "callIndex": 1,
    "toolCallId": "call_1",
    "name": "draw_chart",
    "nodeType": "builtin",
    "input": {"title": "Sales", "series": [3, 1, 4]},
    "status": "PENDING",
    "creditEstimate": 12,
    "creditUsed": 0,
    "resultUrls": [],
    "errorCode": None,
    "errorMessage": None,
    "startedAt": None,
    "finishedAt": None,
    "durationMs": None,
    "createdAt": "2026-11-20T12:34:57.020Z",
    "updatedAt": "2026-11-20T12:34:57.020Z",
}
WAITPOINT: dict[str, Any] = {
    "id": WAITPOINT_ID,
    "agentRunId": RUN_ID,
    "kind": "CREDIT_APPROVAL",
    "status": "PENDING",
    "requestPayload": {"toolName": "draw_chart", "estimatedCredits": 12, "threshold": 10},
    "resolvedPayload": None,
    "expiresAt": "2026-11-21T12:34:57.020Z",
    "resolvedAt": None,
}
WAITING = STARTED | {
    "status": "waiting",
    "assistantMessageId": ANSWER_ID,
    "lastStreamIndex": 5,
    "resolvedModel": "demo",
    "updatedAt": "2026-11-20T12:34:57.020Z",
    "startedAt": "2026-11-20T12:34:56.789Z",
    "toolInvocations": [CALL],
    "totalCreditsUsed": 0.0415,
    "pendingWaitpoint": WAITPOINT,
}
ANSWERED = WAITPOINT | {
    "status": "COMPLETED",
    "resolvedPayload": {"approved": True, "respondedAt": "2026-11-20T12:36:10.305Z"},
    "resolvedAt": "2026-11-20T12:36:10.305Z",
}
CANCELLED = WAITING | {
    "status": "cancelled",
    "lastStreamIndex": 8,
    "cancelRequestedAt": "2026-11-20T12:36:10.305Z",
    "updatedAt": "2026-11-20T12:36:10.305Z",
    "finishedAt": "2026-11-20T12:36:10.305Z",
    "toolInvocations": [CALL | {"status": "CANCELLED", "finishedAt": "2026-11-20T12:36:10.305Z"}],
    "pendingWaitpoint": None,
}

# Method and path within a surface → what is sent and what is answered.
EXAMPLES: dict[str, tuple[Any, Any]] = {
    "POST chats": ({"title": "Sales of the third quarter"}, CHAT),
    "GET chats": (None, {"items": [CHAT], "nextCursor": None}),
    "GET chats/{chatId}": (None, CHAT),
    "PATCH chats/{chatId}": ({"title": "Sales"}, CHAT | {"title": "Sales", "updatedAt": "2026-11-20T12:40:00.000Z"}),
    "POST chats/{chatId}/runs": (
        {"message": "Draw our sales.", "tools": ["draw_chart"], "maxCredits": 20, "onActiveRun": "enqueue"},
        STARTED,
    ),
    "GET runs/{runId}": (None, WAITING),
    "POST runs/{runId}/cancel": (None, CANCELLED),
    "GET waitpoints/{waitpointId}": (None, WAITPOINT),
    "POST waitpoints/{waitpointId}/respond": ({"kind": "CREDIT_APPROVAL", "approved": True}, ANSWERED),
    "GET me/credits": (None, {"balance": "87.9585", "held": "12", "available": "75.9585"}),
    "GET me/credits/usage-summary": (
        None,
        {
            "groups": [
                {
                    "toolKey": "draw_chart",
                    "displayName": "Draw chart",
                    "totalDebited": "12",
                    "records": 1,
                    "latestUsageAt": "2026-11-20T12:36:11.100Z",
                }
            ],
            "totalDebitedAll": "12",
            "recordsAll": 1,
            "categoriesCount": 1,
            "periodStart": "2026-11-13T12:40:00.000Z",
            "periodEnd": "2026-11-20T12:40:00.000Z",
        },
    ),
    "GET me/credits/usage-entries-by-chat": (
        None,
        {
            "entries": [
                {
                    "chatId": CHAT_ID,
                    "chatTitle": "Sales of the third quarter",
                    "amount": "12.0415",
                    "timestamp": "2026-11-20T12:36:11.100Z",
                }
            ]
        },
    ),
    "GET me/credits/ledger/chat/{chatId}": (
        None,
        {
            "chatTitle": "Sales of the third quarter",
            "items": [
                {
                    "runId": RUN_ID,
                    "toolName": "draw_chart",
                    "amount": "12",
                    "timestamp": "2026-11-20T12:36:11.100Z",
                },
                {"runId": RUN_ID, "toolName": None, "amount": "0.0415", "timestamp": "2026-11-20T12:34:57.020Z"},
            ],
        },
    ),
    "POST api-keys": (
        {"name": "Nightly report", "expirationDays": 30},
        {
            "id": "key_01kb5w3v6v7w8x9y0z1a2b3c4d",
            "name": "Nightly report",
            "prefix": "awk_5tQz",
            "scopes": ["chats:read", "chats:write", "runs:read", "runs:write"],
            "expiresAt": "2026-12-20T12:30:00.000Z",
            "createdAt": "2026-11-20T12:30:00.000Z",
            "lastUsedAt": None,
            "revokedAt": None,
            "secret": "awk_5tQzExampleExampleExampleExampleExampleExampleExam",
        },
    ),
    "POST webhooks": (
        {"url": "https://receiver.example.com/agents"},
        {
            "id": "whe_01kb5w3v7d8e9f0g1h2j3k4m5n",
            "url": "https://receiver.example.com/agents",
            "secret": "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
            "secondarySecret": None,
            "enabled": True,
            "createdAt": "2026-11-20T12:31:00.000Z",
            "updatedAt": "2026-11-20T12:31:00.000Z",
        },
    ),
    "GET me": (
        None,
        {"id": "1", "username": "ada", "email": "ada@example.com", "createdAt": "2026-11-20T12:00:00.000Z"},
    ),
}
