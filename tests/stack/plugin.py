"""Fixtures for real processes. The report of a failed test includes the logs of the processes.

The service uses PostgreSQL and Redis if TEST_DATABASE_URL and TEST_REDIS_URL are set, else the embedded default.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.stack import forks
from tests.stack.postgres import PostgresServer
from tests.stack.redis import RedisServer
from tests.stack.stack import Stack, drop_templates, live


def pytest_configure() -> None:
    forks.allowed = True


def given_services() -> dict[str, str | None]:
    return {
        "database_url": os.environ.get("TEST_DATABASE_URL") or None,
        "redis_url": os.environ.get("TEST_REDIS_URL") or None,
    }


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """A running service that the tests of a module share."""
    with Stack(**given_services()) as running:
        yield running


@pytest.fixture
def make_stack() -> Iterator[Callable[..., Stack]]:
    """Starts a separate service for the test. The arguments are those of ``Stack``."""
    with ExitStack() as running:
        yield lambda **options: running.enter_context(Stack(**{**given_services(), **options}))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium that the tests of a module share. Meanwhile, the process cannot use Django's models."""
    from tests.stack.browser import chromium

    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def postgres_server() -> Iterator[PostgresServer]:
    """A PostgreSQL that a test may stop, pause and kill."""
    with PostgresServer() as server:
        yield server


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    """A Redis-compatible server that a test may stop, pause, flush and kill."""
    with RedisServer() as server:
        yield server


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Any:
    report: pytest.TestReport = yield
    if report.failed and report.when == "call":
        for running in live:
            report.sections += [(f"log of {name}", process.tail()) for name, process in running.processes.items()]
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    drop_templates()
