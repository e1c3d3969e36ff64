"""For processes under libfaketime, whose 0.9.10 breaks Python's sleep: it goes by the monotonic clock, which the
library was told to leave alone."""

import select
import time


def sleep(seconds: float) -> None:
    select.select([], [], [], max(0.0, seconds))


time.sleep = sleep
