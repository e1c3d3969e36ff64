"""A PgBouncer in transaction mode in front of the tests' PostgreSQL."""

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from tests.stack.postgres import unprivileged_user
from tests.stack.process import Process, free_port, remove_directory, temporary_directory, wait_for

BINARY = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin:/usr/local/sbin")
MISSING = "there is no PgBouncer here (apt install pgbouncer)"


@contextmanager
def pgbouncer(pool_size: int, **options: str) -> Iterator[str]:
    """The URL without a database. ``options`` are further lines of the configuration."""
    direct = psycopg.conninfo.conninfo_to_dict(os.environ["TEST_DATABASE_URL"])
    directory, port = temporary_directory("pgbouncer-"), free_port()
    settings = {
        "listen_addr": "127.0.0.1",
        "listen_port": str(port),
        "unix_socket_dir": "",
        "auth_type": "any",
        "pool_mode": "transaction",
        "default_pool_size": str(pool_size),
        "max_client_conn": "500",
        **options,
    }
    lines = [f"{name} = {value}" for name, value in settings.items()]
    databases = f"* = host={direct['host']} port={direct['port']} user={direct['user']}"
    (directory / "pgbouncer.ini").write_text("\n".join(["[databases]", databases, "[pgbouncer]", *lines, ""]))
    user = unprivileged_user()
    if user:
        shutil.chown(directory, user)
        shutil.chown(directory / "pgbouncer.ini", user)
    command = [str(BINARY), str(directory / "pgbouncer.ini")]
    process = Process("pgbouncer", command, log=directory / "log", directory=directory, user=user)
    process.start()
    try:
        wait_for(lambda: answers(port), 20, "PgBouncer's answer")
        yield f"postgres://{direct['user']}@127.0.0.1:{port}"
    finally:
        process.stop(signal.SIGINT)
        remove_directory(directory)


def answers(port: int) -> bool:
    try:
        with psycopg.connect(f"postgres://any@127.0.0.1:{port}/postgres", connect_timeout=5):
            return True
    except psycopg.OperationalError:
        return False
