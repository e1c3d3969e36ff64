"""Writes docs/settings.md: each variable of config/settings.py with its limits and the ``#:`` comment above it."""

from __future__ import annotations

import re
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

SOURCE = Path(settings.BASE_DIR) / "config" / "settings.py"
INTRODUCTION = """# Settings

All settings are environment variables. On a local machine, you need to set none of them.
[.env.example](../.env.example) has those that a deployment sets. `manage.py check` names each
variable with a wrong value and says how to correct it.

Other limits and intervals are constants beside the code that uses them.

This page is generated from [config/settings.py](../config/settings.py). To change it, change the
declaration or the `#:` comment above the declaration, and run `make docs`.
"""
# Those that nearly every deployment sets come first.
COMMON = (
    "DATABASE_URL", "REDIS_URL", "SECRET_KEY", "ENCRYPTION_KEYS", "BASE_URL", "ALLOWED_HOSTS", "TRUST_FORWARDED_PROTO",
    "TRUSTED_PROXIES", "SESSION_ISSUER", "SESSION_AUDIENCE", "SESSION_JWKS_URL", "SIGNUP_CREDITS", "METRICS_TOKEN",
)  # fmt: skip
SECTION = re.compile(r"# --- (.+?)(?: \(.+\))? -+")
COMMENT = re.compile(r"\s*#: (.+)")
DECLARATION = re.compile(r"\bENV\.\w+\(\s*\"(\w+)\"")


class Command(BaseCommand):
    help = "Write docs/settings.md. CI compares the file with the settings."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--file", type=Path, default=Path(settings.BASE_DIR) / "docs" / "settings.md")

    def handle(self, *args: Any, file: Path, **options: Any) -> None:
        file.write_text(page(SOURCE.read_text()))


def page(source: str) -> str:
    found = {"Most deployments set": dict.fromkeys(COMMON, "")} | rows(source)
    every = {name: row for variables in found.values() for name, row in variables.items()}
    if missing := sorted(settings.ENV.known.keys() - every.keys()):
        raise CommandError(f"Describe in config/settings.py, by a #: comment above: {', '.join(missing)}")
    parts = [INTRODUCTION]
    for title, variables in found.items():
        shown = [name for name in variables if name not in COMMON or not variables[name]]
        if shown:
            table = "".join(every[name] for name in shown)
            parts.append(f"## {title}\n\n| Variable | Default | Values | Meaning |\n|---|---|---|---|\n{table}")
    return "\n".join(parts)


def rows(source: str) -> dict[str, dict[str, str]]:
    """The row of each described variable, by the title of its section and its name."""
    found: dict[str, dict[str, str]] = {}
    section: dict[str, str] = {}
    meaning: list[str] = []
    for line in source.replace('(\n    "', '("').splitlines():
        if match := SECTION.fullmatch(line):
            section = found.setdefault(match[1][0].upper() + match[1][1:], {})
        elif match := COMMENT.fullmatch(line):
            meaning.append(match[1])
        else:
            if meaning and (match := DECLARATION.search(line)):
                if any(match[1] in variables for variables in found.values()):
                    raise CommandError(f"config/settings.py describes {match[1]} twice.")
                default, values = settings.ENV.known[match[1]]
                text = " ".join(meaning)
                shown = f"`{default}`" if default and "(default: " not in text else ""
                section[match[1]] = f"| `{match[1]}` | {shown} | {values} | {text} |\n"
            meaning = []
    return found
