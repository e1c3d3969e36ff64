"""Runs, waitpoints and the catalogue in the OpenAPI document, and the document's own description."""

from __future__ import annotations

from typing import Any

from chats.openapi import CHAT_ID, MESSAGE_ID, RUN_ID
from config.api.openapi.document import Operation, Part
from config.kernel.errors import Forbidden, ValidationFailed
from runs.serializers import RunSerializer, ToolInvocationSerializer, WaitpointSerializer
from runs.services import RunInProgress

DESCRIPTION = """\
Runs AI agents in chats: a run calls tools, spends credits, pauses until its caller answers, and reports its progress by
a stream and by signed webhooks.

Two surfaces have the same resources: `/api/v1` for first-party callers with a session token, `/api/public/v1` for
callers with an API key, which needs the scope that each operation names. Credits are JSON numbers in runs, invocations,
waitpoints and webhooks, and plain decimal strings in every credits endpoint.
"""
ANSWER_ID = "msg_01kb5w3v3n4p5q6r7s8t9v0w1x"
CALL_ID = "inv_01kb5w3v4z5a6b7c8d9e0f1g2h"
WAITPOINT_ID = "wp_01kb5w3v5j6k7m8n9p0q1r2s3t"
# Every field; those without a value in the example are null.
STARTED: dict[str, Any] = dict.fromkeys(RunSerializer().fields) | {
    "id": RUN_ID,
    "chatId": CHAT_ID,
    "status": "queued",
    "userMessageId": MESSAGE_ID,
    "agent": "support@3",
    "lastStreamIndex": 1,
    "createdAt": "2026-11-20T12:34:56.740Z",
    "updatedAt": "2026-11-20T12:34:56.740Z",
    "toolInvocations": [],
    "metadata": {"customer": "c-42"},
    "usage": {"inputTokens": 0, "cachedInputTokens": 0, "outputTokens": 0, "turns": 0, "modelRetries": 0},
    "totalCreditsUsed": 0,
}
CALL: dict[str, Any] = dict.fromkeys(ToolInvocationSerializer().fields) | {
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
    "resultTruncated": False,
    "resultUrls": [],
    "createdAt": "2026-11-20T12:34:57.020Z",
    "updatedAt": "2026-11-20T12:34:57.020Z",
}
AGENT: dict[str, Any] = {
    "name": "support",
    "displayName": "Support",
    "description": "Answers customers.",
    "version": 3,
    "model": None,
    "tools": ["draw_chart", "ask_user"],
}
WAITPOINT: dict[str, Any] = dict.fromkeys(WaitpointSerializer().fields) | {
    "id": WAITPOINT_ID,
    "agentRunId": RUN_ID,
    "kind": "CREDIT_APPROVAL",
    "status": "PENDING",
    "requestPayload": {
        "toolName": "draw_chart",
        "estimatedCredits": 12,
        "threshold": 10,
        "toolInvocationId": CALL_ID,
        "input": {"title": "Sales", "series": [3, 1, 4]},
    },
    "expiresAt": "2026-11-21T12:34:57.020Z",
}
WAITING = STARTED | {
    "status": "waiting",
    "assistantMessageId": ANSWER_ID,
    "answer": "",
    "lastStreamIndex": 5,
    "resolvedModel": "demo",
    "updatedAt": "2026-11-20T12:34:57.020Z",
    "startedAt": "2026-11-20T12:34:56.789Z",
    "toolInvocations": [CALL],
    "usage": {"inputTokens": 23, "cachedInputTokens": 0, "outputTokens": 20, "turns": 1, "modelRetries": 0},
    "totalCreditsUsed": 0.0415,
    "pendingWaitpoint": WAITPOINT,
}
ANSWERED = WAITPOINT | {
    "status": "COMPLETED",
    "resolvedPayload": {"approved": True, "reason": "Within budget.", "respondedAt": "2026-11-20T12:36:10.305Z"},
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
PART = Part(
    tags={
        "runs": "One agent execution each: started in a chat, watched, streamed, cancelled.",
        "waitpoints": "What a run waits for: an approval of credits, or an answer to a question.",
        "models": "The models that runs may use.",
        "tools": "The tools that runs may call.",
        "agents": "The agents that runs may be started with.",
    },
    operations={
        "POST chats/{chatId}/runs": Operation(
            "Start a run",
            "Sends a message to the agent. The run is `queued` and executes as soon as a worker takes it.",
            sent={
                "message": "Draw our sales.",
                "agent": "support",
                "instructions": "The customer is Ada.",
                "tools": ["draw_chart"],
                "maxCredits": 20,
                "metadata": {"customer": "c-42"},
                "onActiveRun": "enqueue",
            },
            answered=STARTED,
        ),
        "GET chats/{chatId}/runs": Operation(
            "List a chat's runs", "The runs of a chat without their tool calls, newest first."
        ),
        "GET runs": Operation("List runs", "The caller's runs without their tool calls, newest first."),
        "GET runs/{runId}": Operation(
            "Get a run", "A run with its tool calls, costs and pending waitpoint.", answered=WAITING
        ),
        "POST runs/{runId}/cancel": Operation(
            "Cancel a run",
            "Stops the run: at once while it is queued or waiting, within a second while it is running. A finished run "
            "stays unchanged.",
            answered=CANCELLED,
        ),
        "GET runs/{runId}/stream": Operation("Stream a run's events"),
        "GET waitpoints/{waitpointId}": Operation(
            "Get a waitpoint", "What a run waits for, or waited for.", answered=WAITPOINT
        ),
        "POST waitpoints/{waitpointId}/respond": Operation(
            "Respond to a waitpoint",
            "Answers a waitpoint, and the run continues. Only the first answer has an effect; every "
            "answer gets the waitpoint as it then is.",
            sent={"kind": "CREDIT_APPROVAL", "approved": True, "reason": "Within budget."},
            answered=ANSWERED,
        ),
        "GET models": Operation("List models", "All models that runs may use, as one page."),
        "GET agents": Operation(
            "List agents",
            "All agents that runs may be started with, as one page.",
            answered={"items": [AGENT], "nextCursor": None},
        ),
        "GET tools": Operation("List tools", "All tools that runs may call, as one page."),
    },
    components={
        "Agent": "Instructions, a model, tools and limits under a name; runs are pinned to one of its versions.",
        "ClarificationAnswerKindEnum": "The kind of an answer to a question.",
        "ClarificationAnswerRequest": "The answer to a question of the agent.",
        "ClarificationQuestion": "A question of the agent.",
        "ClarificationResolution": "How a question was answered.",
        "CreditApprovalAnswerKindEnum": "The kind of an answer to a request for approval.",
        "CreditApprovalAnswerRequest": "The decision about a call that costs more than the run's threshold.",
        "CreditApprovalQuestion": "A call that waits for an approval, with the most that it can cost.",
        "CreditApprovalResolution": "How a request for approval was decided.",
        "FinishReasonEnum": "`length`: the answer was cut at the output limit.",
        "Model": "A model with its prices in credits per 1,000 tokens.",
        "Run": "One agent execution. `completed`, `failed` and `cancelled` are final.",
        "OnActiveRunEnum": "What to do while another run of the chat is active.",
        "RunInputRequest": "A new run: the message to the agent, and the limits of this run.",
        "RunStatusEnum": "`completed`, `failed` and `cancelled` are final.",
        "RunSummary": "A run in a list: without its tool calls, whose number it has.",
        "Tool": "A tool with its price in credits a call, which is the most that a call takes.",
        "ToolInvocation": "A tool call of a run.",
        "ToolInvocationStatusEnum": "Where a tool call is.",
        "Usage": "What the turns of a run used so far.",
        "Waitpoint": "What a run waits for. Answer it with `respond` before `expiresAt`.",
        "WaitpointAnswerRequest": "An answer of the same kind as the waitpoint.",
        "WaitpointKindEnum": "An approval of credits, or an answer to a question.",
        "WaitpointRequestPayload": "What is asked. Its shape depends on the waitpoint's kind.",
        "WaitpointResolvedPayload": "The answer that was given. Its shape depends on the waitpoint's kind.",
        "WaitpointStatusEnum": "Where a waitpoint is. Only a pending one can be answered.",
    },
    errors=(
        ValidationFailed({"message": ["This field is required."]}),
        Forbidden("This operation needs the scope runs:write.", details={"requiredScope": "runs:write"}),
        RunInProgress(),
    ),
)
