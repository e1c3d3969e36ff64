"""The first minutes with the service: errors name the variable and the remedy."""

import fcntl
import os
import socket
from pathlib import Path

import pytest

from tests.stack.process import free_port, python, run

pytestmark = pytest.mark.stack

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
    answer = run(python(*command), kept | {"VAR_DIR": str(tmp_path), "LOG_FORMAT": "json"} | WRONG)
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
    answer = run(python("-m", "config.local"), {"PATH": os.environ["PATH"], **environment})
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
