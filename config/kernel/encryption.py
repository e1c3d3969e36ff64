"""Secrets at rest: a model field that stores Fernet ciphertext.

The first of ``ENCRYPTION_KEYS`` encrypts, any of them decrypts. A value that none of them decrypts raises: showing
ciphertext, or signing with it, would be worse than failing.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from django.conf import settings
from django.db import models


class DecryptionFailed(Exception):
    """None of ENCRYPTION_KEYS opens a stored secret: a key was removed before everything was encrypted anew."""


@lru_cache(maxsize=4)
def _fernet(keys: tuple[str, ...]) -> MultiFernet:
    return MultiFernet([Fernet(key) for key in keys])


def encrypt(plain: str) -> str:
    return _fernet(tuple(settings.ENCRYPTION_KEYS)).encrypt(plain.encode()).decode()


def decrypt(cipher: str) -> str:
    try:
        return _fernet(tuple(settings.ENCRYPTION_KEYS)).decrypt(cipher.encode()).decode()
    except InvalidToken:
        raise DecryptionFailed("No key of ENCRYPTION_KEYS opens this secret; put the old key back.") from None


def is_current(cipher: str) -> bool:
    """Whether the first of ENCRYPTION_KEYS, and not one behind it, made this."""
    try:
        Fernet(settings.ENCRYPTION_KEYS[0]).decrypt(cipher.encode())
    except InvalidToken:
        return False
    return True


class EncryptedField(models.TextField):
    """Text in Python, ciphertext in the database. It can't be filtered by."""

    def get_prep_value(self, value: Any) -> Any:
        return None if value is None else encrypt(str(value))

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> Any:
        return None if value is None else decrypt(value)
