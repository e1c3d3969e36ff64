"""The fields of entries of the catalogue file, which read ``${VARIABLE}`` from the environment."""

import os
import re
from collections.abc import Callable
from typing import Any, ClassVar

from django.core.exceptions import ValidationError
from rest_framework import serializers

from config.api.serializers import BoundedListField, StrictCharField, StrictIntegerField
from config.kernel.jsontext import to_text
from runs.catalogue import rules
from runs.tools.base import is_address, parse_headers

VARIABLE = re.compile(r"\$\$\{|\$\{([^}]*)\}?")
# The largest integer that the columns of both databases can hold.
WHOLE_MAX = 2**31 - 1
OPTIONAL: dict[str, Any] = {"required": False, "allow_null": True}


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
    """``check(value)``; its ValueError becomes a ValidationError of the field."""
    try:
        return check(value)
    except ValueError as error:
        raise serializers.ValidationError(str(error)) from None


def fits(check: Callable[[Any], Any]) -> Callable[[Any], None]:
    """A validator for fields of forms and of serializers, which shows the ValueError of ``check``."""

    def validate(value: Any) -> None:
        try:
            check(value)
        except ValueError as error:
            raise ValidationError(str(error)) from None

    return validate


class Text(StrictCharField):
    default_error_messages: ClassVar = {"invalid": "A text is required. Put it in quotes."}

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"trim_whitespace": False} | kwargs)


class Address(Text):
    def to_internal_value(self, data: Any) -> str:
        url: str = checked(with_variables, super().to_internal_value(data))
        if url and not is_address(url):
            raise serializers.ValidationError(rules.NO_ADDRESS)
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
            except serializers.ValidationError as error:
                raise serializers.ValidationError({name: error.detail}) from None
        return to_text(found) if found else ""


class Whole(StrictIntegerField):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs | {"max_value": min(WHOLE_MAX, kwargs.get("max_value", WHOLE_MAX))})


class OneOf(serializers.ChoiceField):
    def __init__(self, choices: Any, **kwargs: Any) -> None:
        super().__init__(choices, **kwargs)
        self.error_messages["invalid_choice"] = f"Use one of {', '.join(self.choices)}."


class Object(serializers.DictField):
    default_error_messages: ClassVar = {"not_a_dict": "A mapping is required."}

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"required": False} | kwargs)


class Names(BoundedListField):
    child = Text()
