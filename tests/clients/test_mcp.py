"""Official MCP clients, old and new, against the service. tests/mcp/test_client.py has the newest one in Python."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import HERE, NpmFolder, run
from tests.mcp.rpc import TOOLS
from tests.stack.stack import Stack

pytestmark = [pytest.mark.stack, pytest.mark.services, pytest.mark.timeout(600)]

# Package, mode, and the revision if the client tells it.
TYPESCRIPT = [
    ("@modelcontextprotocol/client", "auto", "2026-07-28"),
    ("@modelcontextprotocol/client", "legacy", "2025-11-25"),
    ("@modelcontextprotocol/sdk", "legacy", None),
    ("mcp-sdk-of-2025-06-18", "legacy", None),
    ("mcp-sdk-of-2025-03-26", "legacy", None),
]


def check(said: dict[str, Any]) -> None:
    assert set(said["tools"]) == set(TOOLS)
    assert (said["status"], said["answer"], said["listed"]) == ("completed", "Hello", True)
    assert said["code"] == "NOT_FOUND"


@pytest.mark.parametrize(("package", "mode", "revision"), TYPESCRIPT)
def test_typescript(stack: Stack, npm: NpmFolder, package: str, mode: str, revision: str | None) -> None:
    said = json.loads(npm.run("node", "mcp_client.mjs", package, mode, f"{stack.url}/api/mcp", stack.api_key("ada")))
    check(said)
    assert (said["revision"], said["errors"]) == (revision, [])


def test_python_of_2025(stack: Stack, old_python: Path) -> None:
    script = str(HERE / "mcp_client_of_2025.py")
    said = json.loads(run(str(old_python), script, f"{stack.url}/api/mcp", stack.api_key("ada")))
    check(said)
    assert said["revision"] == "2025-03-26"
