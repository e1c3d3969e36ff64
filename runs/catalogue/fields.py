"""The fields of entries of the catalogue file, which read ``${VARIABLE}`` from the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any, ClassVar, TypeVar

from rest_framework import serializers

from config.api.serializers import BoundedListField, StrictCharField, StrictIntegerField
from config.kernel.encryption import DecryptionFailed
from config.kernel.jsontext import to_text
from runs.catalogue import rules
from runs.tools.base import is_address, parse_headers

T = TypeVar("T")
VARIABLE = re.compile(r"\$\$\{|\$\{([^}]*)\}?")
# What the columns of both databases hold.
WHOLE_MAX = 2**31 - 1
OPTIONAL: dict[str, Any] = {"required": False, "allow_null": True}
# Stands for a secret that no key decrypts: unlike the value of any.
LOST: dict[str, Any] = {"": None}


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


def checked(check: Callable[[Any], T], value: Any) -> T:
    """``check(value)``, with its ValueError as a mistake of the field."""
    try:
        return check(value)
    except ValueError as error:
        raise serializers.ValidationError(str(error)) from None


class Text(StrictCharField):
    default_error_messages: ClassVar = {"invalid": "A text is required. Put it in quotes."}

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"trim_whitespace": False} | kwargs)


class Address(Text):
    def to_internal_value(self, data: Any) -> str:
        url = checked(with_variables, super().to_internal_value(data))
        if url and not is_address(url):
            raise serializers.ValidationError(rules.NO_ADDRESS)
        return url

    def to_representation(self, value: str) -> str:
        return value.replace("${", "$${")


class Secret(Text):
    """A secret that the file leaves out stays; ``null`` and an empty one remove it."""

    def __init__(self, check: Callable[[str], Any] = str, **kwargs: Any) -> None:
        self.check = check
        super().__init__(**OPTIONAL | {"write_only": True, "allow_blank": True} | kwargs)

    def run_validation(self, data: Any = serializers.empty) -> Any:
        return super().run_validation(data) or None

    def to_internal_value(self, data: Any) -> str:
        value = checked(with_variables, super().to_internal_value(data)).strip()
        checked(self.check, value)
        return value

    def read(self, row: Any) -> Any:
        """The row's value, or LOST."""
        try:
            return getattr(row, str(self.source))
        except DecryptionFailed:
            return LOST


class Headers(Secret):
    """A mapping of names to secret values, as JSON text."""

    def to_internal_value(self, data: Any) -> str:
        if not isinstance(data, dict):
            raise serializers.ValidationError("A mapping of header names to values is required.")
        found, wrong = {}, {}
        for name, value in data.items():
            try:
                found[name] = checked(with_variables, StrictCharField.to_internal_value(self, value))
                checked(parse_headers, to_text({name: found[name]}))
            except serializers.ValidationError as error:
                wrong[name] = error.detail
        if wrong:
            raise serializers.ValidationError(wrong)
        return to_text(found) if found else ""

    def read(self, row: Any) -> Any:
        try:
            value = super().read(row)
            return value if value is LOST else dict(sorted(parse_headers(value).items())) or None
        except ValueError:
            return LOST


class Whole(StrictIntegerField):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs | {"max_value": WHOLE_MAX})


class Number(serializers.FloatField):
    def to_internal_value(self, data: Any) -> float:
        if isinstance(data, bool) or not isinstance(data, (int, Decimal)):
            self.fail("invalid")
        return float(data)

    def to_representation(self, value: float) -> Any:
        return int(value) if value.is_integer() else value


class OneOf(serializers.ChoiceField):
    def __init__(self, choices: Any, **kwargs: Any) -> None:
        super().__init__(choices, **kwargs)
        self.error_messages["invalid_choice"] = f"Use one of {', '.join(self.choices)}."


class Object(serializers.Field):
    """A JSON object that ``check`` accepts."""

    def __init__(self, check: Callable[[Any], Any], **kwargs: Any) -> None:
        self.check = check
        super().__init__(**{"required": False} | kwargs)

    def to_internal_value(self, data: Any) -> dict[str, Any]:
        if not isinstance(data, dict):
            raise serializers.ValidationError("A mapping is required.")
        checked(self.check, data)
        return data

    def to_representation(self, value: Any) -> Any:
        return value


class Names(BoundedListField):
    child = Text()
