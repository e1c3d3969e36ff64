"""``StatusChoices``: the statuses of a model with everything that is known of each, declared in one place."""

from __future__ import annotations

from typing import Self

from django.db import models


class StatusChoices(models.TextChoices):
    """A member is ``NAME = value, tone, final`` or, with a label of its own, ``NAME = value, tone, final, label``.

    ``tone`` is how the admin colours the status, by the names of its labels: default, info, success, warning, danger.
    A status that is not ``final`` is ``live``: the row will change again.
    """

    tone: str
    final: bool

    def __new__(cls, value: str, tone: str, final: bool) -> Self:
        member = str.__new__(cls, value)
        member._value_ = value
        member.tone, member.final = tone, final
        return member

    @property
    def live(self) -> bool:
        return not self.final

    @classmethod
    def all_final(cls) -> list[Self]:
        return [status for status in cls if status.final]

    @classmethod
    def all_live(cls) -> list[Self]:
        return [status for status in cls if status.live]

    @classmethod
    def tones(cls) -> dict[str, str]:
        """The tone by value, as the ``label`` of an admin column."""
        return {status.value: status.tone for status in cls}
