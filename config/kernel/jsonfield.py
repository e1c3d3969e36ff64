"""The column of JSON that users, staff or models send and get back."""

from typing import Any

from django.db import models

from config.kernel.jsontext import from_text, to_text


class JSONTextField(models.TextField):
    """A JSON value as text, which keeps the order of keys and the digits of numbers. No query can look into it."""

    # For mypy: values of any type.
    _pyi_private_set_type: Any
    _pyi_private_get_type: Any

    def from_db_value(self, value: str | None, expression: Any, connection: Any) -> Any:
        return None if value is None else from_text(value)

    def to_python(self, value: Any) -> Any:
        return value

    def get_prep_value(self, value: Any) -> str | None:
        return None if value is None else to_text(value)

    def value_to_string(self, obj: Any) -> str:
        return to_text(self.value_from_object(obj))
