"""``python -m benchmarks [NAME …]``: runs the named benchmarks, or all."""

from __future__ import annotations

import sys
from importlib import import_module

NAMES = ("runs", "streams", "webhooks", "lists", "admin", "ledger", "queries")


def main(names: list[str]) -> None:
    for name in names or NAMES:
        if name not in NAMES:
            sys.exit(f"There is no benchmark named {name}; there are {', '.join(NAMES)}.")
        import_module(f"benchmarks.{name}").main()


if __name__ == "__main__":
    main(sys.argv[1:])
