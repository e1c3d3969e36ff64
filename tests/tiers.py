"""What `make test` leaves to the services suite, besides the folders and files that ``conftest.py`` names."""

import os
from typing import Any

import pytest

# Set by `make test`, and by `make test ALL=1`.
FAST = bool(os.environ.get("FAST_TESTS"))
LONG = bool(os.environ.get("LONG_TESTS"))


def slow(*values: Any) -> list[Any]:
    """Values of a parameter that `make test` leaves out. Another value tests the same rule there."""
    rows = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*row, marks=pytest.mark.slow) for row in rows]


def examples(count: int) -> int:
    """How many generated cases a test tries: in `make test` without ALL=1 a fifth."""
    return count // 5 if FAST and not LONG else count
