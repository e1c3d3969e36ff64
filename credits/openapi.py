"""Accounts, the ledger and usage in the OpenAPI document."""

from __future__ import annotations

from config.api.openapi.document import Operation, Part
from credits.ledger import InsufficientCredits

CHAT_ID = "chat_01kb5w3tzp2q3r4s5t6v7w8x9y"
RUN_ID = "run_01kb5w3v1c4d5e6f7g8h9j0k1m"
PART = Part(
    tags={"credits": "Account, ledger and usage."},
    operations={
        "GET me/credits": Operation(
            "Get balance, holds and available credits",
            answered={"balance": "87.9585", "held": "12", "available": "75.9585"},
        ),
        "GET me/credits/ledger": Operation("List the ledger"),
        "GET me/credits/ledger/chat/{chatId}": Operation(
            "Get a chat's credits by tool and run",
            answered={
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
        "GET me/credits/usage-summary": Operation(
            "Get usage by tool",
            answered={
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
        "GET me/credits/usage-entries-by-chat": Operation(
            "Get usage by chat",
            answered={
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
        "GET me/credits/usage-by-day": Operation("Get usage by day"),
    },
    components={
        "Account": "A user's credits. `available` is `balance` less what is `held` for tool calls that are executing.",
        "ChatUsage": "What the runs of one chat spent in a period.",
        "CreditChatRuns": "The credits that a chat spent, by run and tool; `toolName` is null for usage of models.",
        "DayUsage": "What was spent on one day.",
        "LedgerEntry": "One movement. The ledger is append-only.",
        "LedgerEntryTypeEnum": "Why the balance or the held amount changed.",
        "RunUsage": "What one run spent on one tool, or on models.",
        "UsageByChat": "What was spent in a period, by chat.",
        "UsageByDay": "What was spent in a period, by day.",
        "UsageGroup": "What was spent on one tool, or on models.",
        "UsageSummary": "Captures and model usage of a period, by tool.",
    },
    errors=(InsufficientCredits(0),),
)
