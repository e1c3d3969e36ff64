"""The roles that a new installation starts with: groups and their permissions, as ``app.codename``. Plain data, which
migrations read; staff may change the groups afterwards.
"""

from __future__ import annotations

from typing import Any

VIEWER = [
    "admin.view_logentry",
    "apikeys.view_apikey",
    "auth.view_user",
    "chats.view_attachment",
    "chats.view_chat",
    "credits.view_account",
    "credits.view_ledgerentry",
    "runs.view_agentmodel",
    "runs.view_run",
    "runs.view_runevent",
    "runs.view_tool",
    "runs.view_toolinvocation",
    "runs.view_turn",
    "runs.view_waitpoint",
    "webhooks.view_attempt",
    "webhooks.view_delivery",
    "webhooks.view_endpoint",
]
ROLES = {
    "viewer": VIEWER,
    "support": [
        *VIEWER,
        "apikeys.narrow_apikey",
        "apikeys.revoke_apikey",
        "runs.cancel_run",
        "runs.read_run_content",
        "webhooks.disable_endpoint",
    ],
    "billing": [*VIEWER, "credits.adjust_credits", "credits.grant_credits", "credits.refund_credits"],
}


def install(Group: Any, Permission: Any) -> None:
    """Make each role that is not there, with its permissions, all of which must be there."""
    for name, wanted in ROLES.items():
        group, made = Group.objects.get_or_create(name=name)
        if not made:
            continue
        for label in wanted:
            app, _, codename = label.partition(".")
            group.permissions.add(Permission.objects.get(content_type__app_label=app, codename=codename))
