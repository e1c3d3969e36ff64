"""Replaces ``time.sleep`` in processes under libfaketime.

``time.sleep`` uses the monotonic clock. libfaketime 0.9.10 breaks it where that clock must stay correct.
"""

import select
import time


def sleep(seconds: float) -> None:
    select.select([], [], [], max(0.0, seconds))


time.sleep = sleep
