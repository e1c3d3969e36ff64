"""``python -m config.serve.procfile NAME``: become the process of that name in the Procfile.


The container image's entry point, so that its processes are the Procfile's and can't differ.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def processes(path: Path = ROOT / "Procfile") -> dict[str, str]:
    """Each process's shell command by its name."""
    lines = (line.partition(":") for line in path.read_text().splitlines() if line.strip())
    return {name.strip(): command.strip() for name, _, command in lines}


def main(arguments: list[str]) -> None:
    found = processes()
    if len(arguments) != 1 or arguments[0] not in found:
        sys.exit(f"usage: python -m config.serve.procfile {{{','.join(found)}}}")
    os.chdir(ROOT)
    os.execvp("sh", ["sh", "-c", found[arguments[0]]])  # noqa: S606, S607


if __name__ == "__main__":
    main(sys.argv[1:])
