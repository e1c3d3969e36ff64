"""What ``make run`` runs: the whole service on one machine, its state under ``var/``, in the foreground.

Starts each process, prefixes its output, greets once the service answers, and stops everything it started when it is
told to (Ctrl-C, SIGTERM, SIGHUP), when one of the processes ends, or when ``make`` is gone. A process that ends is not
restarted: locally that is a fault to look at, and a half-running service would hide it. Production uses the
Procfile and a real supervisor.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn

from config import settings
from config.local.broker import MISSING, server_binary
from config.local.reaper import Reaper, signal_group

HOST = "127.0.0.1"
READY_SECONDS = 90.0
BROKER_SECONDS = 15.0
TELL_SECONDS = 5.0
ADMIN = "admin"
COLOURS = (36, 33, 35, 32, 34, 31)
CELERY = ("-m", "celery", "-q", "-A", "config")
WORKER = ("worker", "-P", "threads", "--without-gossip", "--without-mingle", "--without-heartbeat")


@dataclass
class Child:
    name: str
    process: subprocess.Popen[str]
    recent: deque[str] = field(default_factory=lambda: deque(maxlen=30))


class Stop(Exception):
    """Control flow: stop everything and exit with ``status``."""

    def __init__(self, status: int, message: str = "") -> None:
        self.status, self.message = status, message
        super().__init__(message)


class LocalService:
    """The processes of one ``make run``."""

    def __init__(self) -> None:
        self.children: list[Child] = []
        self.reaper = Reaper()
        self.printing = threading.Lock()
        self.colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        self.parent = os.getppid()
        self.running = Path(os.environ["RUNNING_FILE"]) if os.environ.get("RUNNING_FILE") else None
        if self.running:
            self.running.touch()
        self.signals: list[int] = []
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, _frame: self.signals.append(number))

    def run(self) -> int:
        try:
            self.start_all()
            while True:
                self.pause(0.5)
        except Stop as stop:
            if stop.message:
                self.say(stop.message)
            self.stop_all()
            return stop.status
        finally:
            self.reaper.close()
            if self.running:
                self.running.unlink(missing_ok=True)

    def start_all(self) -> None:
        if settings.EMBEDDED_BROKER:
            if server_binary() is None:
                raise Stop(1, MISSING)
            self.start("broker", "-m", "config.local.broker", quiet=True)
        self.say("Preparing the database…")
        administrator = self.prepare()
        self.say("Starting the service…")
        if settings.EMBEDDED_BROKER:
            self.await_broker()
        workers = ("--workers", "1", "--bind", f"{HOST}:{settings.PORT}")
        self.start("web", "-m", "gunicorn", "config.wsgi", "--config", "gunicorn.conf.py", *workers)
        self.start("runs", *CELERY, *WORKER, "-n", "runs@%h", "-c", "4", "-Q", "runs")
        # Apart from the runs, so that a slow receiver never delays one; together, and with beat (-B), to spare memory.
        queues = "webhooks,webhooks-retry,maintenance"
        self.start("background", *CELERY, *WORKER, "-B", "-n", "background@%h", "-c", "6", "-Q", queues)
        self.await_ready()
        self.say(greeting(**administrator), prefix=False)

    def start(self, name: str, *arguments: str, quiet: bool = False) -> None:
        """Start ``python ARGUMENTS``. What a quiet child says is shown only if it ends by itself."""
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=settings.BASE_DIR,
            env=child_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # Ctrl-C reaches this program alone, which then stops its children in order.
            start_new_session=True,
        )
        self.reaper.watch(process.pid)
        child = Child(name, process)
        self.children.append(child)
        threading.Thread(target=self.relay, args=(child, process.stdout, quiet), daemon=True).start()

    def relay(self, child: Child, output: IO[str], quiet: bool) -> None:
        colour = COLOURS[len(self.children) % len(COLOURS)]
        for line in output:
            line = line.rstrip()
            if not line:
                continue
            child.recent.append(line)
            if not quiet:
                self.write(child.name, line, colour)

    def write(self, name: str, line: str, colour: int) -> None:
        prefix = f"{name:<10} | "
        if self.colour:
            prefix = f"\033[{colour}m{prefix}\033[0m"
        # The terminal may be gone; the service then still stops in order.
        with self.printing, contextlib.suppress(OSError):
            print(prefix + line, flush=True)  # noqa: T201

    def say(self, text: str, prefix: bool = True) -> None:
        for line in text.splitlines():
            if prefix:
                self.write("service", line, 37)
            else:
                with self.printing, contextlib.suppress(OSError):
                    print(line, flush=True)  # noqa: T201

    def prepare(self) -> dict[str, str | None]:
        """Migrate, in a process that ends again; what ``prepare`` below says of the administrator."""
        result = subprocess.run(
            [sys.executable, "-m", "config.local", "prepare"],
            cwd=settings.BASE_DIR,
            env=child_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        self.check_signals()
        if result.returncode:
            raise Stop(1, "The database could not be prepared (see above).")
        administrator: dict[str, str | None] = json.loads(result.stdout.splitlines()[-1])
        return administrator

    def await_broker(self) -> None:
        deadline = time.monotonic() + BROKER_SECONDS
        while time.monotonic() < deadline:
            with socket.socket(socket.AF_UNIX) as connection, contextlib.suppress(OSError):
                connection.connect(str(settings.BROKER_SOCKET))
                connection.sendall(b"PING\r\n")
                # It answers LOADING until it has read its file.
                if connection.recv(16).startswith(b"+PONG"):
                    return
            self.pause(0.05)
        raise Stop(1, f"The broker did not answer within {BROKER_SECONDS:.0f} seconds.")

    def await_ready(self) -> None:
        url = f"http://{HOST}:{settings.PORT}/readyz"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        deadline = time.monotonic() + READY_SECONDS
        answer, told = "no answer", time.monotonic()
        while time.monotonic() < deadline:
            try:
                with opener.open(url, timeout=5):
                    return
            except urllib.error.HTTPError as error:
                answer = f"{error.code} {error.read(500).decode(errors='replace')}"
            except OSError as error:
                answer = str(error)
            self.pause(0.2)
            if time.monotonic() > told + TELL_SECONDS:
                told = time.monotonic()
                self.say(f"Still starting ({answer})…")
        raise Stop(1, f"The service is not ready after {READY_SECONDS:.0f} seconds: {answer}")

    def pause(self, seconds: float) -> None:
        """Sleep, while watching for everything that ends the whole. Raises Stop."""
        deadline = time.monotonic() + seconds
        while True:
            self.check_signals()
            for child in self.children:
                status = child.process.poll()
                if status is not None:
                    time.sleep(0.2)  # its last lines are still on their way
                    said = "\n".join(f"  {line}" for line in child.recent)
                    raise Stop(1, f"{child.name} ended ({describe(status)}), so all stops. It last said:\n{said}")
            left = deadline - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(left, 0.2))

    def check_signals(self) -> None:
        if self.signals:
            number = self.signals[0]
            raise Stop(0 if number == signal.SIGINT else 128 + number, "Stopping…")
        if self.running and not self.running.exists():
            raise Stop(130, "make was interrupted; stopping.")
        if os.getppid() != self.parent:
            raise Stop(1, "The program that started this one is gone; stopping.")

    def stop_all(self) -> None:
        """The broker last: the others hand over what they hold. A second signal stops waiting."""
        self.signals.clear()
        grace = settings.RUN_SHUTDOWN_GRACE_SECONDS + 10
        broker = [child for child in self.children if child.name == "broker"]
        self.end([child for child in self.children if child.name != "broker"], grace)
        self.end(broker, grace)

    def end(self, children: list[Child], grace: float) -> None:
        for child in children:
            signal_group(child.process.pid, signal.SIGTERM)
        deadline = time.monotonic() + grace
        while any(child.process.poll() is None for child in children):
            if time.monotonic() > deadline or self.signals:
                break
            time.sleep(0.05)
        for child in children:
            # The group outlives its leader if that was killed from outside.
            if signal_group(child.process.pid, signal.SIGKILL) and child.process.poll() is None:
                self.say(f"{child.name} did not stop by itself and was killed.")
            child.process.wait()
            self.reaper.forget(child.process.pid)


def child_environment() -> dict[str, str]:
    """What the user set wins."""
    return {
        "PYTHONUNBUFFERED": "1",
        "LOG_LEVEL": "WARNING",
        "LOG_FORMAT": "text",
        # Containers of developers run as root; in production Celery's warning stands.
        "PYTHONWARNINGS": "ignore:You're running the worker with superuser privileges",
        **os.environ,
    }


def describe(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit status {status}"


def greeting(name: str | None, password: str | None) -> str:
    base = f"http://{HOST}:{settings.PORT}"
    if password:
        sign_in = f"user {name}, one-time password {password}\n{'':22}(it asks you to choose your own)"
    elif name is None:
        sign_in = "there is no administrator; make one: .venv/bin/python manage.py createsuperuser"
    else:
        sign_in = f"user {name}; a forgotten password: .venv/bin/python manage.py changepassword {name}"
    given = [name for name in ("DATABASE_URL", "VAR_DIR") if os.environ.get(name)]
    note = f" (with the same {' and '.join(given)} set)" if given else ""
    shown = f"  Playground          {base}/playground   start a run and watch it live\n"
    playground = shown if settings.PLAYGROUND else ""
    return f"""
The service is running on {base}

{playground}  API documentation   {base}/api/docs
  Admin               {base}/admin/   {sign_in}

A first run, in another terminal{note}:

  TOKEN=$(.venv/bin/python manage.py session_token demo --create | tail -n 1)
  post() {{ curl -sS -H "Authorization: Bearer $TOKEN" -H "Content-Type: application/json" "{base}/api/v1$1" -d "$2"; }}
  CHAT=$(post /chats '{{}}' | .venv/bin/python -c 'import json, sys; print(json.load(sys.stdin)["id"])')
  post /chats/$CHAT/runs '{{"message": "Hello"}}'; sleep 1
  curl -sS -H "Authorization: Bearer $TOKEN" {base}/api/v1/chats/$CHAT/messages

Ctrl-C stops it.
"""


def prepare() -> None:
    """Migrate and see to an administrator. The answer is one line of JSON, ``{"name": text or null, "password": text
    or null}``: who it is, and what opens the admin once as long as they have no password of their own.
    """
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings")
    import django

    django.setup()
    from django.contrib.auth import get_user_model
    from django.core.management import CommandError, call_command
    from django.db import OperationalError

    from config.staff import one_time

    try:
        call_command("check", stdout=io.StringIO())
        call_command("migrate", interactive=False, verbosity=0)
    except (CommandError, OperationalError) as error:
        sys.exit(str(error))
    # WhiteNoise serves the packages' own files here, but complains if this is missing.
    settings.STATIC_ROOT.mkdir(parents=True, exist_ok=True)
    users: Any = get_user_model()._default_manager
    administrator = users.filter(is_superuser=True, is_active=True).order_by("pk").first()
    if administrator is None and not users.filter(username=ADMIN).exists():
        administrator = users.create_superuser(ADMIN, f"{ADMIN}@localhost")
    name = administrator and administrator.get_username()
    waits = administrator is not None and not administrator.has_usable_password()
    password = one_time.tokens.make_token(administrator) if waits else None
    sys.stdout.write(json.dumps({"name": name, "password": password}) + "\n")


def refuse(message: str) -> NoReturn:
    sys.exit(message)


def check_port() -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, settings.PORT))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                refuse(f"Port {settings.PORT} is taken. Stop what listens there, or: make run PORT={settings.PORT + 1}")
            refuse(f"Port {settings.PORT} can't be used: {error.strerror}")


def main() -> None:
    if sys.argv[1:] == ["prepare"]:
        prepare()
        return
    if settings.ENV.problems:
        refuse("\n".join(f"{name}: {remedy}" for name, remedy in settings.ENV.problems))
    settings.VAR_DIR.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (settings.VAR_DIR / "run.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            refuse(f"The service already runs on the state in {settings.VAR_DIR}. Stop it, or set VAR_DIR and PORT.")
        check_port()
        status = LocalService().run()
    sys.exit(status)


if __name__ == "__main__":
    main()
