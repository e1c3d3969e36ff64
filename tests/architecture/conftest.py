"""The rules are about the whole service: each of its modules that registers something is loaded."""

import pytest
from django.urls import get_resolver


@pytest.fixture(scope="session", autouse=True)
def loaded_routes() -> None:
    assert get_resolver().url_patterns
