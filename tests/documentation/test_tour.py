"""README's commands, pasted block by block into one shell beside a running service: each prints what README shows."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tests.e2e.test_make_run import LocalService
from tests.stack.process import ROOT, free_port, python, wait_for

pytestmark = [pytest.mark.stack, pytest.mark.timeout(700)]

BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
# Readers wait for a second. On a busy machine a run needs longer. The run that is cancelled takes 25 s. Each look at a
# run starts two programs.
SLEEP = """
sleep() {
  local end=$((SECONDS + 12))
  while ((SECONDS < end)); do
    case $(api GET /runs/$RUN | pick '_["status"]') in queued|running) command sleep 0.4 ;; *) return ;; esac
  done
}
"""
# What differs between two tours: ids, times, signatures, and the credits of a model's tokens.
VARIES = re.compile(
    r"\b[a-z]+_[0-9a-z]{26}|[0-9a-f]{64}|\d{4}-\d\d-\d\dT[\d:.]+Z|\d\d:\d\d:\d\d|\d+\.\d{3,}|127\.0\.0\.1:\d+"
    # The run that is cancelled costs what was streamed; such a sum can end after one decimal.
    r"""|(?<="balance":")[\d.]+|(?<="available":")[\d.]+|(?<='model', ')[\d.]+"""
)


def pasted(code: str, port: int, receiver: int, python: str) -> str:
    code = code.replace(".venv/bin/python", python)
    code = code.replace("127.0.0.1:8000", f"127.0.0.1:{port}")
    return code.replace("127.0.0.1:9000", f"127.0.0.1:{receiver}").replace("--port 9000", f"--port {receiver}")


def until(text: str) -> str:
    return f'for _ in $(seq 300); do grep -q "{text}" "$LISTENED" && break; command sleep 0.1; done\n'


def script(port: int, python: str) -> tuple[str, list[str]]:
    """The input of the shell, and what README shows after the blocks that have an output."""
    receiver = free_port()
    whole, shown, listens = SLEEP, [], False
    for (language, text), (following, output) in zip(BLOCKS, [*BLOCKS[1:], ("bash", "")], strict=True):
        if language != "bash":
            continue
        code = pasted(text, port, receiver, python)
        if "webhook_listen" in code:
            # Readers run this block in a terminal of its own.
            code = code.rstrip() + ' >"$LISTENED" 2>&1 &\n' + until("Listening")
        elif listens:
            code += until("agent.completed") + 'cat "$LISTENED"\n'
        listens = "webhook_listen" in code
        if following == "":
            shown.append(output)
            code = f"echo '<<<'\n{code}\necho '>>>'\n"
        whole += code
    return whole + "kill %1\n", shown


def shell(commands: str, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", commands], cwd=folder, env=environment, capture_output=True, text=True, timeout=150, check=False
    )


def compared(text: str) -> list[str]:
    lines = [VARIES.sub("…", line) for line in text.strip().splitlines() if line]
    # Webhooks are sent at the same time, in no order.
    return sorted(lines) if "verified)" in text else lines


def take(service: LocalService, state: Path, folder: Path, python: str) -> None:
    """Paste README's commands into a shell in ``folder``, once the service has greeted."""
    try:
        wait_for(lambda: service.said("Ctrl-C stops it"), 420, "the greeting")
        commands, shown = script(service.port, python)
        environment = {**os.environ, "VAR_DIR": str(state / "var"), "LISTENED": str(state / "listened")}
        environment |= {"DATABASE_URL": "", "REDIS_URL": "", "BASE_URL": f"http://127.0.0.1:{service.port}"}
        (state / "listened").touch()
        done = shell(commands, folder, environment)
        printed = re.findall(r"^<<<\n(.*?)^>>>$", done.stdout, re.DOTALL | re.MULTILINE)
        assert len(printed) == len(shown) >= 8, done.stderr
        for found, expected in zip(printed, shown, strict=True):
            assert compared(found) == compared(expected), done.stderr
        # The two commands at the top of README.
        (first,) = (text for language, text in BLOCKS if language == "" and text.startswith("make run"))
        hello = pasted(first.splitlines()[1].partition("  #")[0], service.port, 0, python)
        said = shell(hello, folder, environment)
        assert "Hello! I am the demo model" in said.stdout, said.stderr
    finally:
        # As Ctrl-C does: to each process of the terminal.
        os.killpg(service.process.pid, signal.SIGINT)
        service.process.wait(40)


def link_packages(venv: Path) -> None:
    """Make the virtual environment with pip and the packages of requirements.txt alone, linked to those of this one. To
    download and to compile them again takes 30 s of CPU time, and CI does it before all tests, with the same rule.
    """
    subprocess.run(python("-m", "venv", "--without-pip", str(venv)), check=True)
    (site,) = venv.glob("lib/python*/site-packages")
    for name in ["pip", *re.findall(r"^([\w.-]+).*==", (ROOT / "requirements.txt").read_text(), re.MULTILINE)]:
        # make installs what is not here, as a package of another system.
        with contextlib.suppress(metadata.PackageNotFoundError):
            package = metadata.distribution(name)
            for top in {file.parts[0] for file in package.files or []} - {"..", "__pycache__"}:
                (site / top).symlink_to(str(package.locate_file(top)))


def test_a_newcomer_needs_only_a_clone_and_make(tmp_path: Path) -> None:
    """Each block of README prints what README shows. The service has the packages of requirements.txt and no others."""
    if not (ROOT / ".git").exists():  # a copy that cannot be cloned
        take(LocalService(tmp_path), tmp_path, ROOT, sys.executable)
        return
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True, timeout=60)
    link_packages(clone / ".venv")
    take(LocalService(tmp_path, ["make", "-C", str(clone), "run"]), tmp_path, clone, ".venv/bin/python")
