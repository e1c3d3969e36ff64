"""Typed reading of environment variables with limits.

An invalid value raises no error here. It is added to ``problems``, and the default is used, so that one run of
``manage.py check`` names all invalid variables (see ``config.checks``). Only ``config.settings`` reads variables.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import Any, TypeVar

TRUE = {"1", "true", "yes", "on"}
FALSE = {"0", "false", "no", "off", ""}
T = TypeVar("T")


@dataclass
class Env:
    """Reads ``os.environ``. ``problems`` lists (variable, correction) of invalid values, ``known`` the defaults."""

    problems: list[tuple[str, str]] = field(default_factory=list)
    known: dict[str, object] = field(default_factory=dict)

    def text(self, name: str, default: str = "", choices: tuple[str, ...] = ()) -> str:
        value = os.environ.get(name, default).strip()
        self.known[name] = default
        if choices and value not in choices:
            return self._wrong(name, f"use one of {', '.join(choices)}", default)
        return value

    def flag(self, name: str, default: bool) -> bool:
        self.known[name] = default
        value = os.environ.get(name)
        if value is None:
            return default
        if value.strip().lower() in TRUE:
            return True
        if value.strip().lower() in FALSE:
            return False
        return self._wrong(name, "use 1 or 0", default)

    def whole(self, name: str, default: int, low: int = 0, high: int = 2**31 - 1) -> int:
        self.known[name] = default
        value = os.environ.get(name)
        if value is None:
            return default
        try:
            number = int(value)
        except ValueError:
            return self._wrong(name, f"use a whole number from {low} to {high}", default)
        if not low <= number <= high:
            return self._wrong(name, f"use a whole number from {low} to {high}", default)
        return number

    def number(self, name: str, default: float, low: float = 0.0, high: float = 1e9) -> float:
        self.known[name] = default
        value = os.environ.get(name)
        if value is None:
            return default
        try:
            number = float(value)
        except ValueError:
            return self._wrong(name, f"use a number from {low:g} to {high:g}", default)
        if not low <= number <= high:
            return self._wrong(name, f"use a number from {low:g} to {high:g}", default)
        return number

    def items(self, name: str, default: tuple[str, ...] = ()) -> list[str]:
        """A comma-separated list without empty items."""
        self.known[name] = ",".join(default)
        value = os.environ.get(name)
        if value is None:
            return list(default)
        return [item.strip() for item in value.split(",") if item.strip()]

    def postgres(self, name: str) -> dict[str, Any]:
        """Django's database settings from a URL. libpq parses the URL, and its parameters become OPTIONS."""
        import psycopg  # slow, and not needed with SQLite

        engine = {"ENGINE": "config.database.postgresql"}
        value = self.text(name)
        try:
            parts = psycopg.conninfo.conninfo_to_dict(value)
            # libpq also accepts "key=value" text, and checks ports (one per host) only when it connects.
            if not re.match(r"postgres(ql)?://", value) or not re.fullmatch(r"[\d,]*", str(parts.get("port", ""))):
                raise ValueError(name)
            database = engine | {"NAME": parts.pop("dbname")}
        except (KeyError, ValueError, psycopg.Error):
            return self._wrong(
                name, "use postgres://user:password@host:port/name", engine | {"NAME": "", "OPTIONS": {}}
            )
        database |= {key.upper(): parts.pop(key, "") for key in ("user", "password", "host", "port")}
        return database | {"OPTIONS": parts}

    def _wrong(self, name: str, remedy: str, default: T) -> T:
        self.problems.append((name, remedy))
        return default
