"""The roles of a new installation: groups and their permissions, as ``app.codename``.

The migration that seeds the catalogue reads both. They are not in ``runs.admin``, because importing that package
registers the pages of the admin. Staff may change the groups later.
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
    "runs.view_agent",
    "runs.view_agentmodel",
    "runs.view_provider",
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
    """Create the missing roles with their permissions. Raises DoesNotExist for an unknown permission."""
    for name, wanted in ROLES.items():
        group, made = Group.objects.get_or_create(name=name)
        if not made:
            continue
        for label in wanted:
            app, _, codename = label.partition(".")
            group.permissions.add(Permission.objects.get(content_type__app_label=app, codename=codename))
