"""What a new installation starts with: rows of the catalogue, and the roles of staff, which are groups with permissions
(``app.codename``). A migration reads this module. The roles are not in ``runs.admin``, because importing that package
registers the pages of the admin.
"""

from typing import Any

from django.apps import apps as installed

from runs.tools import builtin

# Column values, which a migration reads. Prices are micro-credits per 1,000 tokens.
# The addresses and keys of the last two come from the environment until staff set others.
PROVIDERS = [{"name": kind, "kind": kind} for kind in ("demo", "openai", "anthropic")]
MODELS: list[dict[str, Any]] = [
    {
        "name": "demo",
        "display_name": "Demo (offline)",
        "provider": "demo",
        "provider_model": "demo",
        "price_in": 500_000,
        "price_out": 1_500_000,
        # Low, because credits are held for it: a new user's credits must be enough for many runs side by side.
        "max_output_tokens": 4096,
        "is_default": True,
        "enabled": True,
    }
]


def add_builtin_tools(using: str = "default", apps: Any = installed, **kwargs: Any) -> None:
    """Receiver of post_migrate: add a row for each built-in tool whose name no row has. Other rows stay unchanged."""
    try:
        Tool = apps.get_model("runs", "Tool")
    except LookupError:
        return  # the migrations of this app were reverted
    rows = [Tool(**tool.row()) for tool in builtin.TOOLS.values()]
    Tool.objects.using(using).bulk_create(rows, ignore_conflicts=True)


VIEWED = {
    "admin": ["logentry"],
    "apikeys": ["apikey"],
    "auth": ["user"],
    "chats": ["attachment", "chat"],
    "credits": ["account", "ledgerentry"],
    "runs": ["agent", "agentmodel", "provider", "run", "runevent", "tool", "toolinvocation", "turn", "waitpoint"],
    "webhooks": ["attempt", "delivery", "endpoint"],
}
VIEWER = [f"{app}.view_{model}" for app, models in VIEWED.items() for model in models]
ROLES = {
    "viewer": VIEWER,
    "support": [
        *VIEWER,
        *("apikeys.narrow_apikey", "apikeys.revoke_apikey", "runs.cancel_run", "runs.read_run_content"),
        "webhooks.disable_endpoint",
    ],
    "billing": [*VIEWER, "credits.adjust_credits", "credits.grant_credits", "credits.refund_credits"],
}


def install_roles(Group: Any, Permission: Any) -> None:
    for name, wanted in ROLES.items():
        group, made = Group.objects.get_or_create(name=name)
        for label in wanted if made else ():
            app, _, codename = label.partition(".")
            group.permissions.add(Permission.objects.get(content_type__app_label=app, codename=codename))
