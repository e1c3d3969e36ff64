"""The rows that a new installation starts with, and the built-in tools that a new version adds."""

from __future__ import annotations

from typing import Any

from django.apps import apps as installed

from runs.tools import builtin

# Column values, which a migration reads. Prices are micro-credits per 1,000 tokens.
PROVIDERS: list[dict[str, Any]] = [
    {"name": "demo", "kind": "demo"},
    # Their addresses and keys come from the environment until staff set others.
    {"name": "openai", "kind": "openai"},
    {"name": "anthropic", "kind": "anthropic"},
]
MODELS: list[dict[str, Any]] = [
    {
        "name": "demo",
        "display_name": "Demo (offline)",
        "provider": "demo",
        "provider_model": "demo",
        "price_in": 500_000,
        "price_out": 1_500_000,
        # So that a new user's credits suffice for many runs side by side: credits are held for it.
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
