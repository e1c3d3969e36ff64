"""``python -m config.serve.procfile NAME``, the container's entry point, runs one process of the Procfile."""

import os
import sys
from pathlib import Path

from honcho.environ import parse_procfile

ROOT = Path(__file__).resolve().parents[2]


def processes() -> dict[str, str]:
    """The shell command of each process by name."""
    return dict(parse_procfile((ROOT / "Procfile").read_text()).processes)


def main(arguments: list[str]) -> None:
    found = processes()
    if len(arguments) != 1 or arguments[0] not in found:
        sys.exit(f"usage: python -m config.serve.procfile {{{','.join(found)}}}")
    os.chdir(ROOT)
    os.execvp("sh", ["sh", "-c", found[arguments[0]]])  # noqa: S606, S607


if __name__ == "__main__":
    main(sys.argv[1:])
