"""Columns that only the module with the model's key may change. Inserts need no key; SQL text is not checked."""

from collections.abc import Iterable
from typing import Any, ClassVar, TypeVar

from django.db import models

M = TypeVar("M", bound=models.Model)


class Key:
    """Permits changes of the protected fields of the models for which it was taken."""


class FieldIsProtected(Exception):
    pass


_keys: dict[type[models.Model], Key] = {}


def take_key(*protected: type[models.Model]) -> Key:
    """The key of these models. It is handed out once, to the module that asks for it at import."""
    if taken := [model.__name__ for model in protected if model in _keys]:
        raise RuntimeError(f"the key of {', '.join(taken)} is taken")
    key = Key()
    _keys.update(dict.fromkeys(protected, key))
    return key


def require_key(model: type[models.Model], names: Iterable[str], key: Key | None) -> None:
    """Raises FieldIsProtected if ``names`` has a protected field of the model and ``key`` is not the model's."""
    protected: frozenset[str] = getattr(model, "protected_fields", frozenset())
    if not protected.isdisjoint(names) and (key is None or _keys.get(model) is not key):
        raise FieldIsProtected(f"{model.__name__}: {', '.join(sorted(protected.intersection(names)))}")


class ProtectedQuerySet(models.QuerySet[M]):
    def update(self, **changes: Any) -> int:
        require_key(self.model, changes, None)
        return super().update(**changes)

    def change(self, key: Key, **changes: Any) -> int:
        """``update`` by the holder of the model's key."""
        require_key(self.model, changes, key)
        return super().update(**changes)

    def bulk_create(self, *args: Any, **options: Any) -> list[M]:
        require_key(self.model, options.get("update_fields") or (), None)
        return super().bulk_create(*args, **options)


class ProtectedModel(models.Model):
    """A stored row is saved with ``update_fields`` only: a full save would write back protected fields as read."""

    protected_fields: ClassVar[frozenset[str]] = frozenset({"status"})

    objects = models.Manager.from_queryset(ProtectedQuerySet)()

    class Meta:
        abstract = True

    def save(self, **options: Any) -> None:
        names = options.get("update_fields")
        is_update = names is not None or options.get("force_update") or not self._state.adding
        if is_update and not options.get("force_insert"):
            require_key(type(self), self.protected_fields if names is None else names, None)
        super().save(**options)
