"""The words of the OpenAPI document: what it says of itself, of each operation, and of each shape."""

DESCRIPTION = """\
Runs AI agents in chats: a run calls tools, spends credits, pauses until its caller answers, and tells what it does by a
stream and by signed webhooks.

Two surfaces have the same resources: `/api/v1` for first-party callers with a session token, `/api/public/v1` for
callers with an API key, which needs the scope that each operation names. Credits are JSON numbers in runs, invocations,
waitpoints and webhooks, and plain decimal strings in every credits endpoint.
"""

TAGS = {
    "chats": "Chats, and the messages and runs in them.",
    "runs": "One agent execution each: started in a chat, watched, streamed, cancelled.",
    "waitpoints": "What a run waits for: an approval of credits, or an answer to a question.",
    "attachments": "Files for messages: announced, uploaded, completed.",
    "models": "The models that runs may use.",
    "tools": "The tools that runs may call.",
    "credits": "Account, ledger and usage.",
    "api-keys": "Keys of the public surface.",
    "key": "The key that a request bears.",
    "webhooks": "The endpoint that is told of runs and tool calls.",
    "me": "The caller.",
}

# Method and path within a surface.
SUMMARIES = {
    "GET me": "Get the caller",
    "POST api-keys": "Create an API key",
    "GET api-keys": "List API keys",
    "DELETE api-keys/{keyId}": "Revoke an API key",
    "GET key": "Get the key of this request",
    "GET webhooks": "Get the webhook endpoint",
    "POST webhooks": "Create, change or rotate the webhook endpoint",
    "PATCH webhooks": "Switch the webhook endpoint on or off",
    "DELETE webhooks": "Delete the webhook endpoint",
    "GET webhooks/deliveries": "List webhook deliveries",
    "GET me/credits": "Get balance, holds and available credits",
    "GET me/credits/ledger": "List the ledger",
    "GET me/credits/ledger/chat/{chatId}": "Get a chat's credits by tool and run",
    "GET me/credits/usage-summary": "Get usage by tool",
    "GET me/credits/usage-entries-by-chat": "Get usage by chat",
    "GET me/credits/usage-by-day": "Get usage by day",
    "POST chats": "Create a chat",
    "GET chats": "List chats",
    "GET chats/{chatId}": "Get a chat",
    "PATCH chats/{chatId}": "Rename a chat",
    "DELETE chats/{chatId}": "Delete a chat",
    "GET chats/{chatId}/messages": "List a chat's messages",
    "POST attachments": "Announce a file",
    "GET attachments/{attachmentId}": "Get an attachment",
    "POST attachments/{attachmentId}/complete": "Complete an upload",
    "GET attachments/{attachmentId}/content": "Download a file",
    "POST chats/{chatId}/runs": "Start a run",
    "GET chats/{chatId}/runs": "List a chat's runs",
    "GET runs": "List runs",
    "GET runs/{runId}": "Get a run",
    "POST runs/{runId}/cancel": "Cancel a run",
    "GET runs/{runId}/stream": "Stream a run's events",
    "GET waitpoints/{waitpointId}": "Get a waitpoint",
    "POST waitpoints/{waitpointId}/respond": "Respond to a waitpoint",
    "GET models": "List models",
    "GET tools": "List tools",
}

COMPONENTS = {
    "Account": "A user's credits. `available` is `balance` less what is `held` for tool calls that are at work.",
    "ApiError": "Every error has this shape.",
    "ApiKey": "A key without its secret.",
    "Attachment": "A file for a message.",
    "Attempt": "One try of a delivery, with the answer's status code or an error.",
    "Chat": "Groups messages and runs. At most one of its runs is active at a time.",
    "CreatedApiKey": "A new key. This answer alone holds its `secret`.",
    "CreditChatRuns": "What a chat took, by run and tool; `toolName` is null for bare model usage.",
    "LedgerEntry": "One movement. The ledger is append-only.",
    "Me": "The user whose session token the request bears.",
    "Message": "A user's message or an agent's answer.",
    "Model": "A model with its prices in credits per 1,000 tokens.",
    "OwnKey": "The key that the request bears.",
    "Run": "One agent execution. `completed`, `failed` and `cancelled` are final.",
    "Tool": "A tool with its price in credits a call, which is the most that a call takes.",
    "ToolInvocation": "A tool call of a run.",
    "UsageSummary": "Captures and model usage of a period, by tool.",
    "EndpointInputRequest": "`url` is absolute, http or https, without credentials or fragment.",
    "Upload": "Where the file goes: one request, the raw bytes as its body, with these headers and no bearer token.",
    "Waitpoint": "What a run waits for. Answer it with `respond` before `expiresAt`.",
    "WebhookEndpoint": "`secret` is shown in full only when it is made; later as its last 4 characters.",
}
