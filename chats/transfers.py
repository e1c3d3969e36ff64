"""Uploads and downloads that are under way in this process: at most ATTACHMENT_TRANSFERS_PER_USER of a user."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from config.kernel.errors import RateLimited

# Uploads and downloads of one user that a web process handles at the same time; one more is 429.
ATTACHMENT_TRANSFERS_PER_USER = 10

RETRY_AFTER_SECONDS = 1

_lock = threading.Lock()
_under_way: Counter[int] = Counter()


@contextmanager
def transfer(user_id: int) -> Iterator[None]:
    """Raises RateLimited if the user has too many. Another thread may leave it than the one that entered it."""
    with _lock:
        if _under_way[user_id] >= ATTACHMENT_TRANSFERS_PER_USER:
            message = "Too many of your files are uploaded or downloaded at the same time; try again later."
            raise RateLimited(message, headers={"Retry-After": str(RETRY_AFTER_SECONDS)})
        _under_way[user_id] += 1
    try:
        yield
    finally:
        with _lock:
            _under_way[user_id] -= 1
            if not _under_way[user_id]:
                del _under_way[user_id]
