"""Writes docs/settings.md from config/settings.py: each declaration with its limits and the ``#:`` comment above it."""

from __future__ import annotations

import ast
import inspect
import math
import re
from argparse import ArgumentParser
from collections.abc import Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Variable:
    name: str
    default: str
    values: str
    meaning: str


class Command(BaseCommand):
    help = "Write docs/settings.md. CI compares the file with the settings."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--file", type=Path, default=Path(settings.BASE_DIR) / "docs" / "settings.md")

    def handle(self, *args: Any, file: Path, **options: Any) -> None:
        file.write_text(page(SOURCE.read_text()))


def page(source: str) -> str:
    parts, found = [INTRODUCTION], sections(source)
    known = {one.name: one for variables in found.values() for one in variables}
    common = [known[name] for name in COMMON if name in known]
    others = {title: [one for one in variables if one not in common] for title, variables in found.items()}
    for title, variables in {"Most deployments set": common, **others}.items():
        if not variables:
            continue
        rows = "".join(f"| `{one.name}` | {one.default} | {one.values} | {one.meaning} |\n" for one in variables)
        parts.append(f"## {title}\n\n| Variable | Default | Values | Meaning |\n|---|---|---|---|\n{rows}")
    return "\n".join(parts)


def sections(source: str) -> dict[str, list[Variable]]:
    """The variables by the titles of the sections in which they are declared. Each must have a description."""
    lines = source.splitlines()
    found: dict[str, list[Variable]] = {}
    described, undescribed = set(), []
    for call, name in declarations(source):
        meaning = " ".join(comment_above(lines, call.lineno))
        if not meaning:
            undescribed.append(name)
            continue
        if name in described:
            raise CommandError(f"config/settings.py describes {name} twice.")
        described.add(name)
        title = next(match[1] for line in reversed(lines[: call.lineno]) if (match := SECTION.fullmatch(line)))
        default, values = default_and_values(call)
        if default is None and "(default: " not in meaning:
            raise CommandError(f"The default of {name} is computed: add it to its comment, as (default: …).")
        found.setdefault(title[0].upper() + title[1:], []).append(Variable(name, default or "", values, meaning))
    if missing := sorted(set(undescribed) - described):
        raise CommandError(f"Describe in config/settings.py, by a #: comment above: {', '.join(missing)}")
    return found


def declarations(source: str) -> Iterator[tuple[ast.Call, str]]:
    """The calls of ENV that read a variable, in the order of the file, with its name."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda call: call.lineno):
        if isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "ENV":
            yield call, ast.literal_eval(call.args[0])


def comment_above(lines: list[str], number: int) -> list[str]:
    found: list[str] = []
    for line in reversed(lines[: number - 1]):
        if not (match := COMMENT.fullmatch(line)):
            break
        found.insert(0, match[1])
    return found


def default_and_values(call: ast.Call) -> tuple[str | None, str]:
    """The default as it is written in the environment, or None if it is computed, and which values are accepted."""
    kind = ast.unparse(call.func).removeprefix("ENV.")
    reader = inspect.signature(getattr(settings.ENV, kind))
    given = reader.bind(*call.args, **{str(word.arg): word.value for word in call.keywords})
    given.apply_defaults()
    limits = {name: constant(value) for name, value in given.arguments.items() if name not in ("name", "default")}
    values = {
        "flag": "`0`, `1`",
        "items": "comma-separated",
        "text": ", ".join(f"`{choice}`" for choice in limits.get("choices", ())),
    }.get(kind, "")
    if "low" in limits:
        unlimited = limits["high"] == reader.parameters["high"].default
        values = f"from {limits['low']:.15g}" + ("" if unlimited else f" to {limits['high']:.15g}")
    default = constant(given.arguments.get("default", ""))
    if default is None:
        return None, values
    if isinstance(default, tuple):
        default = ",".join(default)
    text = default if isinstance(default, str) else f"{default:.15g}"
    return f"`{text}`" if text else "", values


def constant(value: Any) -> Any:
    """The value of an expression of constants, such as ``24 * 3600``; None if it contains a name."""
    if isinstance(value, ast.BinOp):
        left, right = constant(value.left), constant(value.right)
        operator = {ast.Mult: math.prod, ast.Pow: lambda pair: pair[0] ** pair[1]}[type(value.op)]
        return operator((left, right))
    if not isinstance(value, ast.expr):
        return value
    try:
        return ast.literal_eval(value)
    except ValueError:
        return None
