"""The rules of the catalogue that staff's forms and the catalogue file share, as messages for people."""

import re
from collections.abc import Collection, Sequence

from django.db import connection

from runs.models import AgentModel, Provider, Tool
from runs.tools import builtin
from runs.tools.base import ASK_USER, BUILTIN, CLIENT, is_address
from runs.tools.dispatch import TYPES

TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
FALLBACKS_MAX = 10
TIMEOUT_MIN_SECONDS, TIMEOUT_MAX_SECONDS = 0.1, 3600
# Limits of secrets, which the database stores encrypted.
API_KEY_MAX_CHARS, HEADERS_MAX_CHARS, SIGNING_SECRET_MAX_CHARS = 4096, 10_000, 500
NO_ADDRESS = "Use an http(s) address without credentials."


def problem_of_names(names: Sequence[str], known: Collection[str], most: int, what: str) -> str | None:
    if len(names) > most or len(set(names)) < len(names):
        return f"At most {most} names, each once."
    unknown = next((name for name in names if name not in known), None)
    return f"There is no {what} named {unknown[:100]}." if unknown is not None else None


def problems_of_tool(*, name: str, node_type: str, url: str, cancel_url: str, price: int) -> dict[str, str]:
    """The problems by column."""
    found = {}
    if not TOOL_NAME.fullmatch(name):
        found["name"] = "Use letters, digits, _ and - only: models accept no other names."
    if node_type in TYPES and TYPES[node_type].needs_url and not is_address(url):
        found["url"] = "A tool of this type needs an http(s) address without credentials."
    if cancel_url and not is_address(cancel_url):
        found["cancel_url"] = NO_ADDRESS
    if node_type == CLIENT and url:
        found["url"] = "A tool of the caller's app has no address."
    if node_type == CLIENT and price:
        found["price"] = "A tool of the caller's app costs nothing."
    if node_type == BUILTIN and name not in builtin.TOOLS:
        found["node_type"] = f"The built-in tools are {', '.join(builtin.TOOLS)}."
    if node_type != BUILTIN and name == ASK_USER:
        found["node_type"] = f"{ASK_USER} is built in."  # its calls open waitpoints, whatever their type
    return found


def lock() -> None:
    """Make other transactions that change the catalogue wait, as any writer does on SQLite. Readers do not wait."""
    if connection.vendor == "postgresql":
        names = ", ".join(model._meta.db_table for model in (Provider, AgentModel, Tool))
        with connection.cursor() as cursor:
            cursor.execute(f"LOCK TABLE {names} IN SHARE ROW EXCLUSIVE MODE")


def replace_default(model: AgentModel) -> None:
    """Call it before ``model`` is stored as the default: a constraint refuses two defaults."""
    AgentModel.objects.filter(is_default=True).exclude(pk=model.pk).update(is_default=False)
