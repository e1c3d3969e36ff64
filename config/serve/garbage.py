"""How often Python looks for garbage in processes that serve for long."""

import gc


def spare_what_is_loaded() -> None:
    """What is loaded stays, and what a request or a task makes is nearly all freed at once: looking through it again
    and again was a tenth of a request.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
