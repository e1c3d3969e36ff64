"""A separate Redis-compatible server on a loopback port."""

from pathlib import Path

import redis

from config.local.broker import MISSING, server_binary, server_command
from tests.stack.process import Server, free_port, temporary_directory, wait_for

DATABASES = 512


class RedisServer(Server):
    """``with RedisServer() as server:``; ``persistent``: whether its data survives a restart."""

    def __init__(self, persistent: bool = True) -> None:
        binary = server_binary()
        if binary is None:
            raise RuntimeError(MISSING)
        self.data = temporary_directory("redis-")
        self.port = free_port()
        command = [*server_command(binary, self.data, port=self.port), "--databases", str(DATABASES)]
        if not persistent:
            command += ["--appendonly", "no"]
        super().__init__("redis", command, log=self.data / "log")

    def url(self, database: int = 0) -> str:
        return f"redis://127.0.0.1:{self.port}/{database}"

    def client(self, database: int = 0) -> redis.Redis:
        return redis.Redis.from_url(self.url(database), socket_timeout=5, socket_connect_timeout=5)

    def start(self) -> None:
        super().start()
        wait_for(self.ready, 15, "the Redis-compatible server's answer")

    def ready(self) -> bool:
        self.check()
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.RedisError:
            return False

    def flush(self) -> None:
        with self.client() as client:
            client.flushall()


def embedded_command(state: Path) -> list[str]:
    """The command of the embedded broker of the service whose VAR_DIR is ``state``."""
    return server_command(server_binary() or MISSING, state, socket=state / "broker.sock")


def own_database(url: str) -> str:
    """``url`` with a database number that no other caller of this test run uses. The database is empty."""
    base, _, number = url.partition("?")[0].rpartition("/")
    if base.endswith("/") or not number.isdigit():
        base = url.partition("?")[0].rstrip("/")
    with redis.Redis.from_url(f"{base}/0") as client:
        # Database 0 holds only the counter of used databases.
        available = int(client.config_get("databases")["databases"])  # type: ignore[index]
        mine = 1 + int(client.incr("tests:databases")) % (available - 1)  # type: ignore[arg-type]
    with redis.Redis.from_url(f"{base}/{mine}") as client:
        client.flushdb()
    return f"{base}/{mine}"
