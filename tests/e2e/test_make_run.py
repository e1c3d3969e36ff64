"""What needs real processes: `make run`, a whole run, a killed worker, an orderly stop, a malformed request."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import requests

from tests.stack.process import ROOT, free_port, wait_for
from tests.stack.reaper import reap, signal_group
from tests.stack.stack import Client, Stack

pytestmark = pytest.mark.stack


def completed(client: Client, run_id: str) -> bool:
    return bool(client.get(f"/runs/{run_id}").json()["status"] == "completed")


def start_run(client: Client, message: str) -> str:
    chat = client.post("/chats").json()["id"]
    answer = client.post(f"/chats/{chat}/runs", json={"message": message})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def test_a_run_completes_over_both_surfaces(stack: Stack) -> None:
    for client in (stack.session("ada"), stack.public("ada")):
        run_id = start_run(client, "/say hello")
        stack.wait_for(lambda client=client, run_id=run_id: completed(client, run_id), what="the run's end")


def test_a_killed_run_worker_is_noticed_and_can_be_restarted(stack: Stack) -> None:
    client = stack.session("ada")
    stack.kill("runs-1")
    run_id = start_run(client, "/say hello")
    assert not stack.processes["runs-1"].running
    stack.restart("runs-1")
    stack.wait_for(lambda: completed(client, run_id), what="the run's end")


def answer_to(stack: Stack, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", stack.port), timeout=10) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.parametrize(
    ("request_head", "status"),
    [
        (b"GARBAGE", 400),
        (b"GET /api/v1/me HTTP/1.1\r\nBad Header: x", 400),
        (b"POST /api/v1/chats HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: x", 400),
        (b"GET /api/v1/me HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Long: " + b"x" * 20_000, 431),
        (b"GET /api/v1/" + b"x" * 70_000 + b" HTTP/1.1\r\nHost: 127.0.0.1", 414),
    ],
)
def test_a_malformed_http_request_is_refused(stack: Stack, request_head: bytes, status: int) -> None:
    """What is HTTP has the error envelope; otherwise the server's own answer has no body."""
    head, _, body = answer_to(stack, request_head + b"\r\n\r\n").partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode())
    assert (b"HEADERS_TOO_LARGE" in body) if status == 431 else (body == b"")


def test_an_id_of_ten_thousand_characters_is_not_found(stack: Stack) -> None:
    assert stack.session("ada").get("/chats/" + "x" * 10_000).status_code == 404


def test_sigterm_ends_each_process(stack: Stack) -> None:
    """The last test of these processes."""
    ended = {name: stack.processes[name].stop() for name in ("runs-1", "webhooks", "maintenance", "beat", "web")}
    assert {name: status for name, status in ended.items() if status not in (0, -signal.SIGTERM)} == {}


def test_the_reaper_ends_its_registered_process_groups() -> None:
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_DFL); time.sleep(600)"
    orphan, spared = (subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=True) for _ in range(2))
    # A zombie process still counts as a member of its group.
    threading.Thread(target=orphan.wait).start()
    try:
        reap([f"+ {orphan.pid}\n", f"+ {spared.pid}\n", f"- {spared.pid}\n"])
        assert orphan.wait(10) == -signal.SIGTERM
        assert spared.poll() is None
    finally:
        for process in (orphan, spared):
            signal_group(process.pid, signal.SIGKILL)
            process.wait()


class LocalService:
    """``python -m config.local`` as ``make run`` starts it, or ``make run`` itself, with its own state directory."""

    def __init__(self, state: Path, command: Sequence[str] = (sys.executable, "-m", "config.local")) -> None:
        self.port = free_port()
        self.log = state / "output"
        kept = {name: value for name, value in os.environ.items() if name not in ("DATABASE_URL", "REDIS_URL")}
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**kept, "VAR_DIR": str(state / "var"), "PORT": str(self.port)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def said(self, text: str) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        return text in self.log.read_text()


def check_printed_links_and_password(service: LocalService) -> None:
    """The printed links work, and the printed password opens the admin. It is printed once and stored as a hash."""
    text, base = service.log.read_text(), f"http://127.0.0.1:{service.port}"
    (password,) = re.findall(r"user admin, password (\S+)", text)
    (token,) = re.findall(r"/playground#token=(\S+)", text)
    links = dict(re.findall(r"^  ([A-Z][\w ]*?) {2,}(http://\S+)", text, re.M))
    assert {"Playground", "API documentation", "Admin"} <= set(links)
    with requests.Session() as browser:
        browser.trust_env = False
        bearer = {"Authorization": f"Bearer {token}"}
        assert browser.get(f"{base}/api/v1/me", headers=bearer, timeout=20).json()["username"] == "demo"
        for path in ("/playground", "/api/docs", "/admin/"):
            assert f"{base}{path}" in text
        for name, link in links.items():
            answer = browser.get(link, timeout=30)
            assert answer.status_code == 200, name
            # Without a built site, the documentation is its Markdown.
            kind = "text/plain" if name == "Documentation" else "text/html"
            assert kind in answer.headers["Content-Type"], name
        form = {"username": "admin", "password": password, "csrfmiddlewaretoken": browser.cookies["csrftoken"]}
        answer = browser.post(f"{base}/admin/login/?next=/admin/", form, timeout=20)
        assert "Oldest queued run" in answer.text
    var = service.log.parent / "var"
    # Messages, files and secrets of all users.
    assert var.stat().st_mode & 0o777 == 0o700
    assert not [path for path in var.rglob("*") if path.is_file() and password.encode() in path.read_bytes()]


def check_printed_steps_and_commands(service: LocalService) -> None:
    """Each long step is announced before it begins, and the printed commands run as they are."""
    said = service.log.read_text()
    for earlier, later in (("Preparing the database…", "Starting the service…"), ("Starting the", "is running on")):
        assert said.index(earlier) < said.index(later)
    snippet = said[said.index("A first run") : said.index("Ctrl-C stops it")].partition(":\n")[2]
    done = subprocess.run(
        ["bash", "-ec", snippet.replace(".venv/bin/python", sys.executable)],
        cwd=ROOT,
        env={**os.environ, "VAR_DIR": str(service.log.parent / "var"), "DATABASE_URL": "", "REDIS_URL": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Hello! I am the demo model" in done.stdout
    # Log lines are plain text, not JSON.
    assert '{"time"' not in service.log.read_text()


def check_a_killed_worker_is_replaced(service: LocalService) -> None:
    file = service.log.parent / "var" / "runs.pid"
    killed = file.read_text()
    os.kill(int(killed), signal.SIGKILL)
    wait_for(lambda: service.said("ended by signal 9; starting again"), 30, "the restart")
    wait_for(lambda: file.exists() and file.read_text() not in ("", killed), 30, "the new worker")


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_make_run_leaves_no_process_behind(state: Path, number: signal.Signals) -> None:
    """The first start makes the state, and the others find it."""
    import psutil

    is_new = not (state / "var").exists()
    service = LocalService(state)
    children: list[psutil.Process] = []
    try:
        wait_for(lambda: service.said("Ctrl-C stops it"), 90, "the greeting")
        children = psutil.Process(service.process.pid).children(recursive=True)
        assert len(children) >= 5
        assert ("user admin. For a new password" in service.log.read_text()) != is_new
        if number == signal.SIGINT:
            check_printed_links_and_password(service)
            check_printed_steps_and_commands(service)
            check_a_killed_worker_is_replaced(service)
            children = psutil.Process(service.process.pid).children(recursive=True)
        service.process.send_signal(number)
        assert service.process.wait(40) == {signal.SIGINT: 0, signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
        psutil.wait_procs(children, timeout=20)
        assert [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE] == []
    finally:
        for child in children:
            if child.is_running():
                child.kill()
        service.process.kill()
        service.process.wait()
