"""Fixtures that the tests of all apps share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone
from rest_framework.test import APIClient
from whitenoise.middleware import WhiteNoiseMiddleware

from config.kernel import clock
from config.queue import nudges as queue_nudges
from tests import factories

# Folders with slow tests: real processes, or loops over all operations or pages. `make test-services` runs them.
SLOW_FILES = {"test_worst_inputs.py"}
SLOW = {"admin", "clients", "concurrency", "contract", "deployed", "e2e", "faults", "isolation", "mcp", "streams"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name in SLOW or item.path.name in SLOW_FILES:
            item.add_marker(pytest.mark.slow)
    # Files that start processes come first, and among them those with the fewest tests, because these tests take
    # longest. A long test at the end would run while the other workers are idle.
    tests, most = Counter(item.path for item in items), len(items)
    items.sort(key=lambda item: tests[item.path] if item.get_closest_marker("stack") else most)


@pytest.fixture(autouse=True, scope="session")
def static_files_are_looked_for_once() -> Iterator[None]:
    """Each test client creates the middleware, which would otherwise scan all static files every time."""
    look, found = WhiteNoiseMiddleware.add_files_from_finders, {}

    def once(middleware: WhiteNoiseMiddleware) -> None:
        if not found:
            look(middleware)
            found.update(middleware.files)
        middleware.files.update(found)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WhiteNoiseMiddleware, "add_files_from_finders", once)
        yield


@pytest.fixture(autouse=True)
def pages_have_no_limit(settings: Any) -> None:
    """All tests send their requests from one address."""
    settings.RATE_LIMIT_PAGES = 0


@pytest.fixture(autouse=True)
def clock_is_right() -> Iterator[None]:
    """A test that moves the steady clock must not leave this process with a wrong time."""
    yield
    if clock._synced is not None:
        moment, at = clock._synced
        if abs(moment + timedelta(seconds=clock.steady() - at) - timezone.now()) > timedelta(seconds=1):
            clock._synced = None


@pytest.fixture(autouse=True)
def nudges(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...], float | None]]:
    """The published messages as (task, args, countdown). Only tests with a real stack use a broker."""
    published: list[tuple[str, tuple[Any, ...], float | None]] = []
    monkeypatch.setattr(
        queue_nudges, "nudge", lambda task, *args, countdown=None: published.append((task, args, countdown))
    )
    return published


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """Restore the catalogue, because transactional tests empty all tables."""
    if request.node.get_closest_marker("django_db") or {"db", "transactional_db"} & set(request.fixturenames):
        request.getfixturevalue(
            "transactional_db" if "transactional_db" in request.fixturenames else "_django_db_helper"
        )
        factories.seed_catalogue()


@pytest.fixture
def user(db):
    return factories.UserFactory()


@pytest.fixture
def session(user) -> APIClient:
    """A client of /api/v1 as ``user``."""
    return factories.session_client(user)


@pytest.fixture
def public(user) -> APIClient:
    """A client of /api/public/v1 as ``user``, with a key of the default scopes."""
    return factories.public_client(user)
