"""What processes log when they start: one line when they are ready, and one if the database is not available."""

import os
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.stack.process import ROOT, Process, free_port, python, run, wait_for
from tests.stack.stack import CELERY, WORKER, Stack

pytestmark = [pytest.mark.stack, pytest.mark.slow]

READY = re.compile(r"INFO +config\.telemetry\.logs: (ready: .+)")
AWAY = re.compile(r"WARNING +config\.database\.retry: (the database is not available .+)")


def found(pattern: re.Pattern[str], process: Process) -> list[str]:
    return pattern.findall(process.log.read_text()) if process.log.exists() else []


def test_each_process_says_once_that_it_is_ready(make_stack: Callable[..., Stack]) -> None:
    stack = make_stack(environment={"LOG_FORMAT": "text"})
    port = free_port()
    stack.process_environment["stream"] = {"PORT": str(port), "PATH": f"{ROOT}/.venv/bin:{os.environ['PATH']}"}
    stack.add("stream", python("-m", "config.serve.procfile", "stream"))
    expected = {
        "web": rf"web on 127\.0\.0\.1:{stack.port}",
        "stream": rf"stream on 0\.0\.0\.0:{port}",
        "runs-1": r"worker runs-1@\S+ of runs",
        "webhooks": r"worker webhooks@\S+ of webhooks, webhooks-retry",
        "maintenance": r"worker maintenance@\S+ of maintenance",
        "beat": "beat",
    }
    for name in expected:
        stack.wait_for(lambda name=name: found(READY, stack.processes[name]), 60, f"{name} to be ready")
    lines = {name: found(READY, stack.processes[name]) for name in expected}
    for name, what in expected.items():
        assert len(lines[name]) == 1, lines
        assert re.fullmatch(rf"ready: {what}, version \d+\.\d+\.\d+", lines[name][0]), lines
        assert found(AWAY, stack.processes[name]) == []


def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("0.0.0.0", 0)) as other:
        port = other.getsockname()[1]
        given = {"PATH": os.environ["PATH"], "VAR_DIR": str(tmp_path), "PORT": str(port)}
        answer = run(python("-m", "config.serve"), given)
    assert answer.returncode == 1
    assert answer.stderr.strip() == f"web on 0.0.0.0:{port}: Address already in use (os error 98)"


# --- without a database ----------------------------------------------------------------------------------------------
ADDRESSES = {
    "a closed port": ("postgres://service:hush@127.0.0.1:1/service", "Connection refused"),
    "an unknown host": ("postgres://service:hush@database.invalid/service", "failed to resolve host"),
}


def environment(url: str, directory: Path) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "VAR_DIR": str(directory),
        "DATABASE_URL": url,
        "SECRET_KEY": "made-up-" * 8,
        "LOG_FORMAT": "text",
    }


@pytest.mark.parametrize(
    ("command", "away"),
    [
        ("migrate --noinput", "a closed port"),
        ("migrate --check", "an unknown host"),
        ("catalogue export", "a closed port"),
    ],
)
def test_a_command_ends_with_one_line(tmp_path: Path, command: str, away: str) -> None:
    url, reason = ADDRESSES[away]
    require_one_line(url, reason, tmp_path, command)


def require_one_line(url: str, reason: str, directory: Path, command: str) -> None:
    answer = run(python("manage.py", *command.split()), environment(url, directory))
    lines = [line for line in answer.stderr.splitlines() if "database" in line or "Traceback" in line]
    assert answer.returncode == 1, answer.stderr
    assert len(lines) == 1
    assert lines[0].startswith("The database is not available: ")
    assert reason in lines[0]
    assert "hush" not in answer.stdout + answer.stderr


@pytest.mark.services
@pytest.mark.parametrize(
    ("user", "name", "reason"), [("nobody_here", "postgres", "nobody_here"), ("postgres", "missing", "missing")]
)
def test_a_wrong_role_or_database_is_one_line(tmp_path: Path, postgres_server, user: str, name: str, reason: str):
    url = postgres_server.url(name).replace("postgres@", f"{user}:hush@")
    require_one_line(url, f'"{reason}" does not exist', tmp_path, "migrate --noinput")


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[[str, list[str], dict[str, str]], Process]]:
    processes: list[Process] = []

    def start(name: str, command: list[str], variables: dict[str, str]) -> Process:
        processes.append(Process(name, command, log=tmp_path / f"{name}.log", environment=variables))
        processes[-1].start()
        return processes[-1]

    yield start
    for process in processes:
        process.kill()


@pytest.mark.parametrize(
    ("name", "command", "away"),
    [
        ("web", python("-m", "config.serve", "--workers", "1"), "an unknown host"),
        ("runs", [*CELERY, *WORKER, "-n", "runs@%h", "-c", "2", "-Q", "runs"], "a closed port"),
    ],
    ids=["web", "runs"],
)
def test_a_process_logs_one_line_and_waits_for_the_database(tmp_path: Path, started, name, command, away) -> None:
    url, reason = ADDRESSES[away]
    variables = environment(url, tmp_path) | {"PORT": str(free_port()), "REDIS_URL": "redis://127.0.0.1:1/0"}
    process = started(name, command, variables)
    (line,) = wait_for(lambda: found(AWAY, process), 60, "the line about the database")
    assert reason in line
    assert process.running
    text = process.log.read_text()
    assert "Traceback" not in text
    assert "hush" not in text
