"""The database's host falls silent, or its connections stay on a server that is read-only: requests get 503 in bounded
time, and accepted work is done exactly once as soon as there is a database again.
"""

import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import psycopg
import pytest
import requests

from tests.faults.load import CATALOGUE, OUTSIDE, QUICK, STREAM, Load, slow_result
from tests.faults.test_postgres import TERMINATE
from tests.stack.plugin import given_services
from tests.stack.proxy import Proxy
from tests.stack.stack import Stack
from tests.webhooks.receiver import receiving

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.services, pytest.mark.timeout(300)]

# Longer than the following, and than all leases.
OUTAGE_SECONDS = 8.0
LIMITS = {
    "config.kernel.clock.DATABASE_CLOCK_SECONDS": "4",
    "config.settings.DATABASE_TCP_SECONDS": "5",
    "DATABASE_ANSWER_SECONDS": "3",
    "config.settings.DATABASE_LOCK_SECONDS": "2",
    "config.settings.DATABASE_CONNECT_SECONDS": "2",
    "config.settings.DATABASE_CONN_MAX_AGE": "5",
}
# The answer of the database, two attempts to connect, and time for a busy machine.
BOUND_SECONDS = 20.0


class ProxiedStack(Stack):
    """The processes reach the database through a proxy."""

    proxy: Proxy

    def start_processes(self) -> None:
        url = urlsplit(self.environment["DATABASE_URL"])
        self.proxy = Proxy(str(url.hostname), url.port or 5432)
        self.proxy.__enter__()
        address = f"{url.username}@127.0.0.1:{self.proxy.port}"
        self.environment["DATABASE_URL"] = url._replace(netloc=address).geturl()
        super().start_processes()

    def stop(self) -> None:
        super().stop()
        self.proxy.__exit__()


@pytest.fixture(scope="module")
def load() -> Iterator[Load]:
    with receiving(slow_result) as tools:
        prepared = {"run_workers": 2, "environment": QUICK | LIMITS, "prepare": CATALOGUE.format(url=tools.url)}
        with ProxiedStack(**given_services(), **prepared) as stack, Load(stack, tools) as load:
            yield load


def test_a_silent_host_delays_work_and_loses_none(load: Load) -> None:
    proxy = load.stack.proxy
    with load.going(14, seconds=8):
        run_id = load.start(STREAM)
        load.stack.wait_for(lambda: len(load.runs) > 7, what="runs in progress")
        proxy.silent = True
        silent_since = time.monotonic()
        while time.monotonic() - silent_since < OUTAGE_SECONDS:
            for ask in (
                lambda: load.http.get(f"/runs/{run_id}", timeout=BOUND_SECONDS),
                lambda: load.http.post("/chats", {}, timeout=BOUND_SECONDS),
            ):
                answered = ask()
                assert answered.status_code == 503, answered.text
        assert requests.get(f"{load.stack.url}/readyz", timeout=BOUND_SECONDS).status_code == 503
        proxy.silent = False
    load.check(timeout=120)


def test_connections_to_a_read_only_server_are_replaced(load: Load) -> None:
    enough = len(load.runs) + 7
    with load.going(14, seconds=8):
        load.stack.wait_for(lambda: len(load.runs) > enough, what="runs in progress")
        database = load.stack.environment["DATABASE_URL"]
        name = urlsplit(database).path.lstrip("/")
        with psycopg.connect(str(load.stack.database_url), autocommit=True) as server:
            # Sessions that begin before the RESET stay read-only, as those to the former primary after a failover.
            server.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
            with psycopg.connect(database, autocommit=True) as connection:
                connection.execute(TERMINATE)
            refused = lambda: load.http.post("/chats", {}).status_code == 503  # noqa: E731
            for _ in range(20):
                load.stack.wait_for(refused, what="a read-only server's refusal")
            time.sleep(3)  # longer than all leases
            server.execute(f"ALTER DATABASE {name} RESET default_transaction_read_only")
    load.start(OUTSIDE)
    load.check(timeout=90)
