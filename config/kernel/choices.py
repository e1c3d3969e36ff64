"""``StatusChoices``: the statuses of a model. Each is declared once, with value, label, tone and finality."""

from typing import Self

from django.db import models


class StatusChoices(models.TextChoices):
    """A member is ``NAME = value, tone, final`` or ``NAME = value, tone, final, label``. ``tone`` is its colour in the
    admin: default, info, success, warning or danger. A row's status never changes after a ``final`` one.
    """

    tone: str
    final: bool

    def __new__(cls, value: str, tone: str, final: bool) -> Self:
        member = str.__new__(cls, value)
        member._value_ = value
        member.tone, member.final = tone, final
        return member

    @classmethod
    def tones(cls) -> dict[str, str]:
        """The tone of each value, for the ``label`` of an admin column."""
        return {status.value: status.tone for status in cls}
