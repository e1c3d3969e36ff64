"""A model server for each test, and the settings that lead to it."""

from __future__ import annotations

import pytest

KEY = "sk-test-Very5ecretKey0123456789"


@pytest.fixture(autouse=True)
def _direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loopback is reached without whatever proxy the machine has."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
