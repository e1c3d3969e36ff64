"""The rows that a new installation starts with, and the built-in tools that a new version adds."""

from __future__ import annotations

from typing import Any

from django.apps import apps as installed

from runs.tools import builtin

# Column values, which a migration reads. Prices are micro-credits per 1,000 tokens.
MODELS: list[dict[str, Any]] = [
    {
        "name": "demo",
        "display_name": "Demo (offline)",
        "provider": "demo",
        "provider_model": "demo",
        "price_in": 500_000,
        "price_out": 1_500_000,
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
