"""Valid and invalid requests, single and in sequences, that schemathesis generates from the committed schema."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stack.process import ROOT
from tests.stack.stack import Stack

pytestmark = [pytest.mark.services, pytest.mark.stack, pytest.mark.timeout(240)]

# The operations of the public surface are those of the other one with keys, so fewer requests of it are made.
MANY = ["--max-time=15"]
FEW = ["--phases=examples,fuzzing,stateful", "--max-examples=3"]


@pytest.mark.parametrize(
    ("surface", "prefix", "amount"), [("session", "^/api/v1/", MANY), ("public", "^/api/public/v1/", FEW)]
)
def test_all_schemathesis_checks_pass(
    stack: Stack, tmp_path: Path, surface: str, prefix: str, amount: list[str]
) -> None:
    # A user for each: the requests of one create as many API keys as a user may have.
    user = f"{surface}-tester"
    credential = stack.token(user) if surface == "session" else stack.api_key(user)
    stack.manage("grant_credits", user, "1000000", "--reason", "a test")
    command = [
        str(Path(sys.executable).with_name("schemathesis")),
        "--no-color",
        "run",
        str(ROOT / "docs" / "openapi.json"),
        f"--url={stack.url}",
        f"--header=Authorization: Bearer {credential}",
        f"--include-path-regex={prefix}",
        "--exclude-path=/api/v1/session-tokens",  # it needs a server key, and so do those
        "--exclude-path-regex=^/api/v1/users/",
        "--checks=all",
        *amount,
        "--continue-on-failure",
        "--suppress-health-check=all",
        "--request-timeout=20",
        f"--report-dir={tmp_path}",
    ]
    environment = os.environ | {"SCHEMATHESIS_HOOKS": "tests.contract.schemathesis_hooks", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in stack.logs("web", lines=100_000)
    stack.manage("check_invariants")
