"""Crash points: places where fault tests make a process die or freeze. Without RUN_CRASH_POINT they do nothing.

``RUN_CRASH_POINT=after_tool`` kills the process at that step each time it is reached, as a power cut does.
``freeze:after_tool`` stops the process there the first time, as a suspended machine does, until it gets a SIGCONT.
``committed_STATUS`` is between the commit that brings a run into that status and the messages about it.
"""

import os
import signal
import threading
from functools import partial

from django.db import transaction

RUN_CRASH_POINT = ""  # only fault tests set it

_frozen = False


def crash_point(name: str) -> None:
    global _frozen
    if name == RUN_CRASH_POINT:
        os.kill(os.getpid(), signal.SIGKILL)
    if f"freeze:{name}" == RUN_CRASH_POINT and not _frozen:
        _frozen = True
        # Sent to this thread: another thread could take a signal to the process, while this one continues.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def crash_after_commit(status: str) -> None:
    """A crash point after the commit, before the ``on_commit`` functions that are registered later."""
    if RUN_CRASH_POINT:
        transaction.on_commit(partial(crash_point, f"committed_{status}"))
