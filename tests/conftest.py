"""Fixtures that every app's tests share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from rest_framework.test import APIClient
from whitenoise.middleware import WhiteNoiseMiddleware

from config.queue import nudges as queue_nudges
from tests import factories

# Folders whose tests go through real processes one by one, or every operation or page: for `make test-services`.
SLOW = {"admin", "concurrency", "contract", "deployed", "e2e", "faults", "mcp", "streams"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name in SLOW:
            item.add_marker(pytest.mark.slow)
    # Files that start processes come first, those of one or two tests before all: these take longest, and what is long
    # must not be left for the end, when the other workers have nothing more to do.
    tests, most = Counter(item.path for item in items), len(items)
    items.sort(key=lambda item: tests[item.path] if item.get_closest_marker("stack") else most)


@pytest.fixture(autouse=True, scope="session")
def static_files_are_looked_for_once() -> Iterator[None]:
    """Every test client makes the middleware anew, and with it would look into every static file each time."""
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
def nudges(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...], float | None]]:
    """What was published, as (task, args, countdown). No test outside a real stack talks to a broker."""
    published: list[tuple[str, tuple[Any, ...], float | None]] = []
    monkeypatch.setattr(
        queue_nudges, "nudge", lambda task, *args, countdown=None: published.append((task, args, countdown))
    )
    return published


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """Transactional tests empty every table; those after them find the catalogue all the same."""
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
