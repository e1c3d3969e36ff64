"""``python -m benchmarks [NAME …]``: runs the named benchmarks, or all but those of SEPARATE."""

import sys
from importlib import import_module

NAMES = ("floor", "runs", "streams", "webhooks", "latency", "queries", "filters", "startup")
SEPARATE = ("peers",)  # it needs a package registry


def main(names: list[str]) -> None:
    if unknown := set(names) - {*NAMES, *SEPARATE}:
        sys.exit(f"No benchmark is named {', '.join(sorted(unknown))}; there are {', '.join(NAMES + SEPARATE)}.")
    for done, name in enumerate(names or NAMES):
        print(f"{done} of {len(names or NAMES)} benchmarks done, next: {name}", file=sys.stderr)
        import_module(f"benchmarks.{name}").main()


if __name__ == "__main__":
    main(sys.argv[1:])
