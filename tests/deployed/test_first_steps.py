"""The first minutes with the service: `make run` prints what it does and what to do next. Errors name the variable."""

import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import requests

from tests.deployed.deployment import python
from tests.e2e.test_make_run import LocalService
from tests.stack.process import ROOT, free_port, wait_for

pytestmark = pytest.mark.stack


def test_the_links_and_commands_that_make_run_prints_work(tmp_path: Path) -> None:
    service = LocalService(tmp_path)
    try:
        wait_for(lambda: service.said("Ctrl-C stops it"), 90, "the greeting")
        said = service.log.read_text()
        # Each long step is announced before it begins.
        for earlier, later in (("Preparing the database…", "Starting the service…"), ("Starting the", "is running on")):
            assert said.index(earlier) < said.index(later)
        links = dict(re.findall(r"^  ([A-Z][\w ]*?) {2,}(http://\S+)", said, re.M))
        assert {"Playground", "API documentation", "Admin"} <= set(links)
        for name, link in links.items():
            answer = requests.get(link, timeout=30)
            assert answer.status_code == 200, name
            # Without a built site, the documentation is its Markdown.
        assert ("text/plain" if name == "Documentation" else "text/html") in answer.headers["Content-Type"]
        snippet = said[said.index("A first run") : said.index("Ctrl-C stops it")].partition(":\n")[2]
        done = subprocess.run(
            ["bash", "-ec", snippet.replace(".venv/bin/python", sys.executable)],
            cwd=ROOT,
            env={**os.environ, "VAR_DIR": str(tmp_path / "var"), "DATABASE_URL": "", "REDIS_URL": ""},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "Hello! I am the demo model" in done.stdout
        # Messages, files and secrets of all users.
        assert (tmp_path / "var").stat().st_mode & 0o777 == 0o700
        # Log lines are plain text, not JSON.
        assert '{"time"' not in service.log.read_text()
    finally:
        service.process.send_signal(signal.SIGINT)
        service.process.wait(40)


WRONG = {"PORT": "many", "RATE_LIMIT_PUBLIC": "-1", "SESSION_AUDIENCE": "agents", "DATABASE_URL": "mysql://nowhere/x"}


@pytest.mark.parametrize(
    "command",
    [
        ["-m", "config.serve"],
        ["-m", "celery", "-q", "-A", "config", "worker", "-P", "threads", "-c", "1", "-Q", "maintenance"],
        ["-m", "celery", "-q", "-A", "config", "beat"],
        ["manage.py", "migrate", "--noinput"],
        ["manage.py", "check"],
    ],
    ids=["web", "worker", "beat", "release", "check"],
)
def test_every_process_names_invalid_variables_and_their_remedy(tmp_path: Path, command: list[str]) -> None:
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    answer = subprocess.run(
        python(*command),
        cwd=ROOT,
        env=kept | {"VAR_DIR": str(tmp_path), "LOG_FORMAT": "json"} | WRONG,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    said = answer.stdout + answer.stderr
    assert answer.returncode not in (0, None)
    for remedy in (
        "PORT: use a whole number from 1 to 65535",
        "RATE_LIMIT_PUBLIC: use a whole number from 0",
        "Set SESSION_ISSUER, or remove SESSION_AUDIENCE",
        "DATABASE_URL: use postgres://user:password@host:port/name",
    ):
        assert remedy in said, said[-3000:]


def refused(**environment: str) -> str:
    """What ``make run`` prints when it ends before it starts anything."""
    answer = subprocess.run(
        python("-m", "config.local"),
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert answer.returncode == 1
    assert not (Path(environment["VAR_DIR"]) / "db.sqlite3").exists()
    return answer.stderr


def test_make_run_checks_variables_before_it_starts_anything(tmp_path: Path) -> None:
    assert "PORT: use a whole number from 1 to 65535" in refused(VAR_DIR=str(tmp_path), PORT="many")


def test_make_run_names_an_occupied_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert f"Port {port} cannot be used" in refused(VAR_DIR=str(tmp_path), PORT=str(port))


def test_a_second_make_run_on_the_same_state_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "run.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert f"already runs on the state in {tmp_path}" in refused(VAR_DIR=str(tmp_path), PORT=str(free_port()))


@pytest.mark.parametrize("name", ["check_invariants", "reconcile_credits"])
def test_long_commands_print_their_progress(tmp_path: Path, name: str) -> None:
    environment = {"PATH": os.environ["PATH"], "VAR_DIR": str(tmp_path), "LOG_LEVEL": "WARNING"}
    for command in (["migrate", "--verbosity", "0"], [name]):
        answer = subprocess.run(
            python("manage.py", *command),
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=90,
            check=True,
        )
    assert re.match(r"1 of (\d+) \w+\n2 of \1 ", answer.stderr)
    assert "of" not in answer.stdout.split("\n")[0][:4]
