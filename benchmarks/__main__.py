"""``python -m benchmarks [NAME …]``: runs the named benchmarks, or all but those of SEPARATE."""

from __future__ import annotations

import sys
from importlib import import_module

from django.core.management.base import OutputWrapper

from config.management.progress import Progress

NAMES = (
    "floor", "runs", "streams", "webhooks", "lists", "filters", "admin", "ledger", "queries", "models", "providers",
    "latency", "takeover", "context", "startup", "retention", "text",
)  # fmt: skip
# The first needs a package registry, the second 20 GB of disk and 20 minutes.
SEPARATE = ("peers", "scale")


def main(names: list[str]) -> None:
    if unknown := set(names) - {*NAMES, *SEPARATE}:
        sys.exit(f"No benchmark is named {', '.join(sorted(unknown))}; there are {', '.join(NAMES + SEPARATE)}.")
    progress = Progress(OutputWrapper(sys.stderr), line_seconds=0)
    for done, name in enumerate(names or NAMES):
        progress.show(f"benchmarks done, next: {name}", done, len(names or NAMES))
        progress.close()
        import_module(f"benchmarks.{name}").main()


if __name__ == "__main__":
    main(sys.argv[1:])
