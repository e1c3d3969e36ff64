"""Two users with rows of every kind, which the tests of a module share: to make them takes as long as a test."""

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import transaction

from tests import factories
from tests.contract.world import World, build

ROWS = 20


@pytest.fixture(scope="module")
def worlds(django_db_setup: None, django_db_blocker: Any) -> Iterator[tuple[World, World]]:
    """A user with one row of each kind and a user with ROWS of each kind. Each test rolls its changes back."""
    with django_db_blocker.unblock(), transaction.atomic():
        yield build(factories.UserFactory(), 1), build(factories.UserFactory(), ROWS)
        transaction.set_rollback(True)
