"""The rules of the catalogue that staff's forms and the catalogue file share, as messages for people; and the fields of
the file's entries, which read ``${VARIABLE}`` from the environment.
"""

import os
import re
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, ClassVar

from django.core.exceptions import ValidationError
from django.db import connection
from rest_framework import serializers

from config.api.serializers import BoundedListField, StrictCharField, StrictIntegerField
from config.kernel.jsontext import to_text
from runs.models import AgentModel, Provider, Tool
from runs.tools import builtin
from runs.tools.base import ASK_USER, BUILTIN, CLIENT, is_address, parse_headers
from runs.tools.dispatch import TYPES

TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
FALLBACKS_MAX = 10
TIMEOUT = (0.1, 3600)  # seconds
# Limits of secrets, which the database stores encrypted.
API_KEY_MAX_CHARS, HEADERS_MAX_CHARS, SIGNING_SECRET_MAX_CHARS = 4096, 10_000, 500
NO_ADDRESS = "Use an http(s) address without credentials."
VARIABLE = re.compile(r"\$\$\{|\$\{([^}]*)\}?")
WHOLE_MAX = 2**31 - 1  # the largest integer that the columns of both databases can hold
OPTIONAL: dict[str, Any] = {"required": False, "allow_null": True}


def problem_of_names(names: Sequence[str], known: Collection[str], most: int, what: str) -> str | None:
    if len(names) > most or len(set(names)) < len(names):
        return f"At most {most} names, each once."
    unknown = next((name for name in names if name not in known), None)
    return f"There is no {what} named {unknown[:100]}." if unknown is not None else None


def problems_of_tool(*, name: str, node_type: str, url: str, cancel_url: str, price: int) -> dict[str, str]:
    """The problems by column."""
    found = {}
    if not TOOL_NAME.fullmatch(name):
        found["name"] = "Use letters, digits, _ and - only: models accept no other names."
    if node_type in TYPES and TYPES[node_type].needs_url and not is_address(url):
        found["url"] = "A tool of this type needs an http(s) address without credentials."
    if cancel_url and not is_address(cancel_url):
        found["cancel_url"] = NO_ADDRESS
    if node_type == CLIENT and url:
        found["url"] = "A tool of the caller's app has no address."
    if node_type == CLIENT and price:
        found["price"] = "A tool of the caller's app costs nothing."
    if node_type == BUILTIN and name not in builtin.TOOLS:
        found["node_type"] = f"The built-in tools are {', '.join(builtin.TOOLS)}."
    if node_type != BUILTIN and name == ASK_USER:
        found["node_type"] = f"{ASK_USER} is built in."  # its calls open waitpoints, whatever their type
    return found


def lock() -> None:
    """Make other transactions that change the catalogue wait, as any writer does on SQLite. Readers do not wait."""
    if connection.vendor == "postgresql":
        names = ", ".join(model._meta.db_table for model in (Provider, AgentModel, Tool))
        with connection.cursor() as cursor:
            cursor.execute(f"LOCK TABLE {names} IN SHARE ROW EXCLUSIVE MODE")


def with_variables(text: str) -> str:
    """``text`` with each ``${NAME}`` replaced from the environment; ``$${`` stands for ``${``. Raises ValueError."""
    return VARIABLE.sub(_variable, text)


def variables_of(text: str) -> list[str]:
    return [match[1] for match in VARIABLE.finditer(text) if match[1] is not None]


def _variable(found: re.Match[str]) -> str:
    name = found[1]
    if name is None:
        return "${"
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,200}", name) or not found[0].endswith("}"):
        raise ValueError("Write ${VARIABLE}, or $${ for the text ${.")
    if not os.environ.get(name):
        raise ValueError(f"The environment has no variable {name}, or it is empty.")
    return os.environ[name]


def checked(check: Callable[[Any], Any], value: Any) -> Any:
    """``check(value)``; its ValueError becomes a ValidationError, which fields of forms and of serializers show."""
    try:
        return check(value)
    except ValueError as error:
        raise ValidationError(str(error)) from None


def fits(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A validator for fields of forms and of serializers."""
    return partial(checked, check)


class Text(StrictCharField):
    default_error_messages: ClassVar = {"invalid": "A text is required. Put it in quotes."}

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"trim_whitespace": False} | kwargs)


class Address(Text):
    def to_internal_value(self, data: Any) -> str:
        url: str = checked(with_variables, super().to_internal_value(data))
        if url and not is_address(url):
            raise serializers.ValidationError(NO_ADDRESS)
        return url


class Secret(Text):
    """Never shown. ``null`` or an empty text removes the stored secret; without the field, it stays."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**OPTIONAL | {"allow_blank": True, "write_only": True} | kwargs)

    def run_validation(self, data: Any = serializers.empty) -> Any:
        return super().run_validation(data) or None

    def to_internal_value(self, data: Any) -> str:
        text: str = checked(with_variables, super().to_internal_value(data))
        return text.strip()


class Headers(Secret):
    """A mapping of header names to secret values; stored as JSON text."""

    def to_internal_value(self, data: Any) -> str:
        if not isinstance(data, dict):
            raise serializers.ValidationError("A mapping of header names to values is required.")
        found = {}
        for name, value in data.items():
            try:
                found[name] = super().to_internal_value(value)
                checked(parse_headers, to_text({name: found[name]}))
            except (ValidationError, serializers.ValidationError) as error:
                raise serializers.ValidationError({name: serializers.as_serializer_error(error)}) from None
        return to_text(found) if found else ""


class Whole(StrictIntegerField):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs | {"max_value": min(WHOLE_MAX, kwargs.get("max_value", WHOLE_MAX))})


class OneOf(serializers.ChoiceField):
    def __init__(self, choices: Any, **kwargs: Any) -> None:
        super().__init__(choices, **kwargs)
        self.error_messages["invalid_choice"] = f"Use one of {', '.join(self.choices)}."


Object = partial(serializers.DictField, error_messages={"not_a_dict": "A mapping is required."})


class Names(BoundedListField):
    child = Text()
