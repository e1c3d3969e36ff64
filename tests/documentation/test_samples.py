"""The samples of the docs that are marked ``run``, as programs of their own beside a running service.

A mark after the language of a block says how it is tested: ``run`` here, with BASE_URL, API_KEY, TOKEN and RUN_ID in
the environment; ``tour`` here too, after the first block of README's tour. Blocks without a mark are tested beside the
code that they are about, or are no programs.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stack.process import ROOT
from tests.stack.stack import Stack

pytestmark = pytest.mark.stack

HELLO = "Hello! I am the demo model"
# What a sample prints, among other things.
PRINTED = {
    "api.md": ["completed", HELLO],
    "testing.md": ["passed"],
    "streams.md": ["message.completed", "run.status", HELLO],
    "webhooks.md": ["secret"],
}
PROGRAMS = {"bash": ("sh", "bash"), "python": ("py", sys.executable), "javascript": ("mjs", "node")}
SAMPLES = [
    pytest.param(page.name, language, code, id=f"{page.stem}-{language}")
    for page in sorted((ROOT / "docs").glob("*.md"))
    for language, code in re.findall(r"^```(bash|python|javascript) run\n(.*?)^```$", page.read_text(), re.M | re.S)
]


def test_both_pages_have_a_sample_in_each_language() -> None:
    found = [(page, language) for page, language, _ in (sample.values for sample in SAMPLES)]
    wanted = [(page, language) for page in ("api.md", "streams.md") for language in PROGRAMS]
    assert [one for one in wanted if one not in found] == []


@pytest.fixture(scope="module")
def environment(stack: Stack) -> dict[str, str]:
    ada = stack.public("ada")
    chat = ada.post("/chats").json()["id"]
    run = ada.post(f"/chats/{chat}/runs", json={"message": "Hello"}).json()["id"]
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    token = stack.session("ada").credential
    return kept | {"BASE_URL": stack.url, "API_KEY": ada.credential, "TOKEN": token, "RUN_ID": run}


def execute(language: str, code: str, folder: Path, environment: dict[str, str]) -> str:
    suffix, program = PROGRAMS[language]
    if (found := shutil.which(program)) is None or ("jq " in code and shutil.which("jq") is None):
        pytest.skip(f"{program} or jq is not installed")
    file = folder / f"sample.{suffix}"
    file.write_text(code)
    command = [found, *(["-euo", "pipefail"] if language == "bash" else []), str(file)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(("page", "language", "code"), SAMPLES)
def test_a_sample_runs_as_shown(tmp_path: Path, environment, page: str, language: str, code: str) -> None:
    printed = execute(language, code, tmp_path, environment)
    assert [text for text in PRINTED[page] if text not in printed] == []


def test_a_file_is_uploaded_as_shown(tmp_path: Path, environment) -> None:
    (code,) = re.findall(r"^```bash tour\n(.*?)^```$", (ROOT / "docs" / "attachments.md").read_text(), re.M | re.S)
    (tour,) = re.findall(r"^(api\(\) .*\npick\(\) .*\n)", (ROOT / "README.md").read_text(), re.M)
    tour = tour.replace("http://127.0.0.1:8000", environment["BASE_URL"]).replace(".venv/bin/python", sys.executable)
    (tmp_path / "report.pdf").write_bytes(b"%PDF-1.4\n%%EOF\n")
    assert '"READY"' in execute("bash", tour + code, tmp_path, environment)
