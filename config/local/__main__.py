"""``make run``: all processes of the service on one machine, in the foreground, with their state in ``VAR_DIR``.

honcho starts them, prefixes their output, and ends all at the same time, after Ctrl-C, SIGTERM, or the end of one. This
module prepares the database, starts killed processes again, ends all when it is killed or ``make`` ends, and runs the
embedded broker, which must end after the processes that use it.
"""

import contextlib
import fcntl
import json
import multiprocessing
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import urllib3
from honcho.manager import Manager
from honcho.printer import Printer

from config import settings
from config.local.broker import MISSING, server_binary, server_command

HOST = "127.0.0.1"
READY_SECONDS = 90.0
ADMIN = "admin"
RUNNING_FILE = Path(os.environ["RUNNING_FILE"]) if os.environ.get("RUNNING_FILE") else None
CELERY = "celery -q --skip-checks -A config worker -P threads --without-gossip --without-mingle --without-heartbeat"
PROCESSES = {
    "web": f"config.serve --host {HOST} --workers 1",
    # README.md kills the process of this file.
    "runs": f"{CELERY} -n runs@%h -c 4 -Q runs --pidfile {shlex.quote(str(settings.VAR_DIR / 'runs.pid'))}",
    # A separate process, because a slow webhook receiver must not delay a run.
    "background": f"{CELERY} -n background@%h -c 6 -Q webhooks,webhooks-retry,maintenance",
    # Not part of "background" (-B): if that process is killed, its beat keeps the output open, and honcho waits.
    "beat": "celery -q -A config.beat beat",
}
# In the shell that leads the group of a process: ends the group when this process, the owner, has ended for any reason,
# so that nothing keeps using a port or a database. A stopped process handles SIGTERM only after SIGCONT.
GUARD = """(
  while kill -0 $OWNER; do sleep 1; done
  trap "" TERM; kill -TERM 0; kill -CONT 0; sleep 5; kill -KILL 0
) >/dev/null 2>&1 &
"""
# Starts the command again after a signal.
SUPERVISE = f"""{GUARD}
while :; do
  sh -c "exec $COMMAND"; status=$?
  test $status -gt 128 || exit $status
  echo "ended by signal $((status - 128)); starting again"; sleep 1
done"""
# Of the child processes: defaults for local use; a variable that the user set wins. ``OWNER`` is this process.
ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    "SECRET_KEY": settings.SECRET_KEY,
    "LOG_LEVEL": "WARNING",
    "LOG_FORMAT": "text",
    # honcho kills the processes 5 seconds after the first has stopped. Interrupted runs continue after the next start.
    "WEB_GRACEFUL_SECONDS": "2",
    "RUN_SHUTDOWN_GRACE_SECONDS": "2",
    # Development containers often run as root. Production keeps Celery's warning.
    "PYTHONWARNINGS": "ignore:You're running the worker with superuser privileges",
    **os.environ,
    "OWNER": str(os.getpid()),
}
# In a session of its own, because Ctrl-C in the terminal must not end the broker before the others.
APART: dict[str, Any] = {"env": ENVIRONMENT, "stdin": subprocess.DEVNULL, "start_new_session": True}


def serve() -> int:
    """Run the service until it is stopped. Returns the exit status."""
    # honcho starts its processes beside a thread of this one.
    multiprocessing.set_start_method("spawn")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _frame: sys.exit(128 + number))
    stopping = threading.Event()
    with embedded_broker() as broker:
        try:
            print("Preparing the database…", flush=True)
            text = prepared()
            print("Starting the service…", flush=True)
            manager = Manager(Printer(sys.stdout, colour="NO_COLOR" not in os.environ))
            for name, command in PROCESSES.items():
                given = ENVIRONMENT | {"COMMAND": f"{shlex.quote(sys.executable)} -m {command}"}
                manager.add_process(name, SUPERVISE, env=given, cwd=str(settings.BASE_DIR))
            threading.Thread(target=watch, args=(manager, broker, text, stopping), daemon=True).start()
            manager.loop()
            # If a process ends without a signal, this is a failure, also with status 0.
            return {128 + signal.SIGINT: 0, 128 + signal.SIGTERM: 128 + signal.SIGTERM}.get(manager.returncode, 1)
        except KeyboardInterrupt:
            return 0
        finally:
            stopping.set()
            # If a signal interrupts honcho's start, its child processes would still start the service's processes.
            for helper in multiprocessing.active_children():
                helper.kill()


@contextlib.contextmanager
def embedded_broker() -> Iterator[subprocess.Popen[bytes] | None]:
    """The running broker, or None if REDIS_URL is set."""
    if settings.REDIS_URL:
        yield None
        return
    binary = server_binary()
    if binary is None:
        sys.exit(MISSING)
    directory = settings.VAR_DIR / "broker"
    directory.mkdir(mode=0o700, exist_ok=True)
    command = ["sh", "-c", f'{GUARD} exec "$@"', "sh", *server_command(binary, directory, settings.BROKER_SOCKET)]
    with (settings.VAR_DIR / "broker.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, **APART)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()


def watch(manager: Manager, broker: subprocess.Popen[bytes] | None, greeting: str, stopping: threading.Event) -> None:
    """Print the greeting when the service is ready. Stop the service for reasons that honcho does not detect."""
    parent = os.getppid()
    ready = False
    started = time.monotonic()
    reason, number = "", signal.SIGTERM
    while not reason:
        if stopping.wait(0.2) or manager.returncode is not None:
            return
        if not ready:
            problem = readiness_problem()
            ready = not problem
            if ready:
                print(greeting, flush=True)
            elif time.monotonic() > started + READY_SECONDS:
                reason = f"The service is not ready after {READY_SECONDS:.0f} seconds: {problem}"
        if broker and broker.poll() is not None:
            reason = f"The broker has ended:\n{(settings.VAR_DIR / 'broker.log').read_text(errors='replace')}"
        # If only make receives an interrupt, it does not forward the signal, but it deletes its target.
        elif os.getppid() != parent or (RUNNING_FILE and not RUNNING_FILE.exists()):
            reason, number = "make has ended.", signal.SIGINT
    print(f"{reason}\nStopping…", flush=True)
    os.kill(os.getpid(), number)


def readiness_problem() -> str:
    """The reason why the service is not ready. Empty if it is ready."""
    try:
        answer = urllib3.request("GET", f"http://{HOST}:{settings.PORT}/readyz", retries=False, timeout=5)
    except urllib3.exceptions.HTTPError as error:
        return str(error)
    text = answer.data.decode(errors="replace")
    return "" if answer.status == 200 and json.loads(text)["status"] == "ok" else f"{answer.status} {text[:500]}"


def prepared() -> str:
    """What ``prepare`` prints, in a child process. This process does not load Django and so needs little memory."""
    try:
        command = [sys.executable, "-m", "config.local", "prepare"]
        return subprocess.check_output(command, cwd=settings.BASE_DIR, text=True, **APART)
    except subprocess.CalledProcessError:
        sys.exit("The preparation of the database failed (see above).")


def greeting(name: str | None, password: str | None, token: str | None) -> str:
    base = f"http://{HOST}:{settings.PORT}"
    if password:
        sign_in = f"user {name}, password {password}\n{'':22}(it is shown only now)"
    elif name is None:
        sign_in = "there is no administrator. Create one: .venv/bin/python manage.py createsuperuser"
    else:
        sign_in = f"user {name}. For a new password: .venv/bin/python manage.py changepassword {name}"
    given = [name for name in ("DATABASE_URL", "VAR_DIR") if os.environ.get(name)]
    note = f" (with the same {' and '.join(given)} set)" if given else ""
    address = f"{base}/playground#token={token}" if token else f"{base}/playground"
    playground = f"  Playground          {address}\n" if settings.PLAYGROUND else ""
    if playground and token:
        playground += f"{'':22}(signs in as the user demo; works for 12 hours)\n"
    return f"""
The service is running on {base}

{playground}  Documentation       {base}/docs
  API documentation   {base}/api/docs
  Admin               {base}/admin/   {sign_in}

A first run, in another terminal{note}:

  .venv/bin/python manage.py run Hello

Ctrl-C stops it.
"""


def prepare() -> None:
    """Migrate the database, apply the catalogue file, create an administrator if there is none, print the greeting."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings")
    import django

    django.setup()
    from django.contrib.auth import get_user_model
    from django.core.management import CommandError, call_command
    from django.db import OperationalError

    from config.api import session_tokens
    from config.api.authentication import DEMO_USER

    try:
        call_command("migrate", interactive=False, verbosity=0, skip_checks=False)
        if settings.CATALOGUE_FILE:
            # The standard output is the greeting.
            call_command("catalogue", "apply", stdout=sys.stderr)
    except (CommandError, OperationalError) as error:
        sys.exit(str(error))
    # WhiteNoise serves the files of the packages, but warns if this directory does not exist.
    settings.STATIC_ROOT.mkdir(parents=True, exist_ok=True)
    users: Any = get_user_model()._default_manager
    administrator = users.filter(is_superuser=True, is_active=True).order_by("pk").first()
    password = None
    if administrator is None and not users.filter(username=ADMIN).exists():
        password = secrets.token_urlsafe(12)
        administrator = users.create_superuser(ADMIN, f"{ADMIN}@localhost", password)
    name = administrator and administrator.get_username()
    is_local = settings.EMBEDDED and not settings.SESSION_ISSUER
    token = session_tokens.mint(DEMO_USER) if is_local else None
    sys.stdout.write(greeting(name, password, token))


def main() -> None:
    if sys.argv[1:] == ["prepare"]:
        prepare()
        return
    if settings.ENV.problems:
        sys.exit("\n".join(f"{name}: {remedy}" for name, remedy in settings.ENV.problems))
    settings.VAR_DIR.mkdir(parents=True, exist_ok=True)
    settings.VAR_DIR.chmod(0o700)  # messages, files and secrets of all users
    with (settings.VAR_DIR / "run.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            sys.exit(f"The service already runs on the state in {settings.VAR_DIR}. Stop it, or set VAR_DIR and PORT.")
        try:
            socket.create_server((HOST, settings.PORT)).close()
        except OSError as error:
            other = f"make run PORT={settings.PORT + 1}"
            sys.exit(f"Port {settings.PORT} cannot be used: {error.strerror}. Stop the other program, or: {other}")
        sys.exit(serve())


if __name__ == "__main__":
    main()
