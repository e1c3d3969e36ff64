"""Tools of an MCP server as rows of the catalogue, from the server's own list."""

import re
from typing import Any

from django.db import transaction

from config.kernel.jsontext import same_json
from runs.catalogue import rules
from runs.models import RESERVED_TOOL_NAMES, Tool
from runs.tools.base import MCP, ToolFailure, clean_text, is_address, parse_headers, shorten
from runs.tools.mcp import list_tools
from runs.tools.schema import read_schema

TOOL_IMPORT_MAX = 500  # the most tools of one MCP server; a server with more is refused

NAME_MAX_CHARS, TITLE_MAX_CHARS, REMOTE_NAME_MAX_CHARS, DESCRIPTION_MAX_CHARS = 64, 100, 200, 20_000


def import_mcp(
    url: str, *, headers: str = "", prefix: str = "", price: int = 0, enabled: bool = True
) -> dict[str, list[Any]]:
    """Add the tools of the server at ``url``, and update the known ones. ``headers``: JSON text of secret headers; if
    empty, known tools keep theirs. ``price``, in micro-credits, and ``enabled`` are for new tools. Returns the rows by
    what happened to them, and (server's name, reason) of what was skipped. Raises ValueError, for staff, if the server
    does not answer with a list of tools.
    """
    if not is_address(url):
        raise ValueError(rules.NO_ADDRESS)
    if not re.fullmatch(rf"[A-Za-z0-9_-]{{0,{NAME_MAX_CHARS // 2}}}", prefix):
        raise ValueError(f"A prefix has at most {NAME_MAX_CHARS // 2} letters, digits, _ and -.")
    try:
        listed = list_tools(url, parse_headers(headers))
    except ToolFailure as failure:
        raise ValueError(failure.message) from None
    if len(listed) > TOOL_IMPORT_MAX:
        raise ValueError(f"The server has {len(listed)} tools; the limit is {TOOL_IMPORT_MAX}.")
    imported: dict[str, list[Any]] = {"added": [], "changed": [], "unchanged": [], "skipped": []}
    stored_headers = {"secret_headers": headers} if headers else {}
    with transaction.atomic():
        rules.lock()
        rows = list(Tool.objects.defer("secret_headers", "signing_secret"))
        taken = {*RESERVED_TOOL_NAMES, *(row.name for row in rows)}
        known = {row.remote_name or row.name: row for row in rows if (row.node_type, row.url) == (MCP, url)}
        for tool in listed:
            try:
                described = _described(tool)
            except ValueError as error:
                imported["skipped"].append((shorten(clean_text(tool.name), NAME_MAX_CHARS), str(error)))
                continue
            if row := known.get(tool.name):
                changed = any(not same_json(getattr(row, column), value) for column, value in described.items())
                if changed or headers:
                    for column, value in (described | stored_headers).items():
                        setattr(row, column, value)
                    row.save(update_fields=[*described, *stored_headers])
                imported["changed" if changed else "unchanged"].append(row)
                continue
            name = prefix + re.sub(r"[^A-Za-z0-9_-]+", "_", tool.name)
            if len(name) > NAME_MAX_CHARS:
                imported["skipped"].append((tool.name, f"The name {name} has more than {NAME_MAX_CHARS} characters."))
                continue
            if name in taken:
                imported["skipped"].append((tool.name, f"The name {name} is taken. A prefix may help."))
                continue
            own = {"remote_name": "" if name == tool.name else tool.name, "price": price, "enabled": enabled}
            row = Tool(name=name, node_type=MCP, url=url, **own, **described, **stored_headers)
            row.save(force_insert=True)
            known[tool.name] = row
            taken.add(name)
            imported["added"].append(row)
    return imported


def _described(listed: Any) -> dict[str, Any]:
    """The columns that come from the server. Raises ValueError if they cannot be stored."""
    if not 0 < len(listed.name) <= REMOTE_NAME_MAX_CHARS or clean_text(listed.name) != listed.name:
        raise ValueError(f"The server's name must have 1 to {REMOTE_NAME_MAX_CHARS} characters.")
    # Before the revision 2025-06-18, the title was among the annotations.
    title = listed.title or (listed.annotations and listed.annotations.title) or listed.name
    return {
        "display_name": shorten(clean_text(title), TITLE_MAX_CHARS),
        "description": shorten(clean_text(listed.description or ""), DESCRIPTION_MAX_CHARS),
        "input_schema": read_schema(listed.input_schema),
    }
