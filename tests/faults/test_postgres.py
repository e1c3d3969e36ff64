"""Database connections break, and the server restarts, under load: accepted work is done exactly once."""

import time
from collections.abc import Iterator

import psycopg
import pytest

from tests.faults.load import Load, at_work
from tests.stack.postgres import PostgresServer

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.services, pytest.mark.timeout(240)]

TERMINATE = """
    SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid()
"""


@pytest.fixture(scope="module")
def load(postgres_server: PostgresServer) -> Iterator[Load]:
    with at_work(database_url=postgres_server.url()) as load:
        yield load


def test_runs_survive_repeated_loss_of_all_connections(load: Load) -> None:
    with load.going(14, seconds=6):
        for _ in range(4):
            time.sleep(1.5)
            with psycopg.connect(load.stack.environment["DATABASE_URL"], autocommit=True) as connection:
                (cut,) = connection.execute(TERMINATE).fetchone() or (0,)
                assert cut
    load.check()


def test_runs_survive_restarts_of_the_server(load: Load, postgres_server: PostgresServer) -> None:
    with load.going(14, seconds=7):
        time.sleep(2)
        postgres_server.stop()
        time.sleep(2.5)  # longer than all leases
        postgres_server.start()
        time.sleep(2)
        postgres_server.kill()
        postgres_server.start()
    load.check()
