"""Typed reading of environment variables, only for ``config.settings``. One check names all invalid ones."""

import os
import re
from dataclasses import dataclass, field
from typing import Any, TypeVar

TRUE = {"1", "true", "yes", "on"}
FALSE = {"0", "false", "no", "off", ""}
MOST = 2**31 - 1  # no limit
T = TypeVar("T")
N = TypeVar("N", int, float)


@dataclass
class Env:
    """Reads ``os.environ``. ``problems``: (variable, correction); ``known``: default and accepted values, for docs."""

    problems: list[tuple[str, str]] = field(default_factory=list)
    known: dict[str, tuple[str, str]] = field(default_factory=dict)

    def text(self, name: str, default: str = "", choices: tuple[str, ...] = ()) -> str:
        value = self._read(name, default, ", ".join(f"`{choice}`" for choice in choices)).strip()
        if choices and value not in choices:
            return self._wrong(name, f"use one of {', '.join(choices)}", default)
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self._read(name, f"{default:d}", "`0`, `1`").strip().lower()
        return value in TRUE if value in TRUE | FALSE else self._wrong(name, "use 1 or 0", default)

    def whole(self, name: str, default: int, low: int = 0, high: int = MOST) -> int:
        return self._limited(int, "a whole number", name, default, low, high)

    def number(self, name: str, default: float, low: float = 0, high: float = MOST) -> float:
        return self._limited(float, "a number", name, default, low, high)

    def _limited(self, kind: type[N], what: str, name: str, default: N, low: N, high: N) -> N:
        value = self._read(name, f"{default:.15g}", f"from {low:.15g}" + ("" if high == MOST else f" to {high:.15g}"))
        remedy = f"use {what} from {low:.15g} to {high:.15g}"
        try:
            number = kind(value)
        except ValueError:
            return self._wrong(name, remedy, default)
        return number if low <= number <= high else self._wrong(name, remedy, default)

    def items(self, name: str, default: tuple[str, ...] = ()) -> list[str]:
        """A comma-separated list without empty items."""
        value = self._read(name, ",".join(default), "comma-separated")
        return [item.strip() for item in value.split(",") if item.strip()]

    def postgres(self, name: str, options: dict[str, Any]) -> dict[str, Any]:
        """Django's database settings from a URL, which libpq parses. Its parameters go before ``options``."""
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
            remedy = "use postgres://user:password@host:port/name"
            return self._wrong(name, remedy, engine | {"NAME": "", "OPTIONS": options})
        database |= {key.upper(): parts.pop(key, "") for key in ("user", "password", "host", "port")}
        return database | {"OPTIONS": options | parts}

    def _read(self, name: str, default: str, accepted: str) -> str:
        self.known[name] = default, accepted
        return os.environ.get(name, default)

    def _wrong(self, name: str, remedy: str, default: T) -> T:
        self.problems.append((name, remedy))
        return default
