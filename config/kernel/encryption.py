"""Encryption of stored secrets. The first key of ``ENCRYPTION_KEYS`` encrypts, and each can decrypt. cryptography is
imported at its first use: it takes 7 MiB, and most processes read no secrets.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from django.conf import settings
from django.db import models

LOST = "\0"  # in place of a secret that no key decrypts; no secret contains this character
HINT = "No key of ENCRYPTION_KEYS decrypts this secret. Add the old key to ENCRYPTION_KEYS again."


class DecryptionFailed(Exception):
    """A key was removed from ENCRYPTION_KEYS before the secret was re-encrypted."""


@lru_cache(maxsize=4)
def _fernet(keys: tuple[str, ...]) -> Any:
    from cryptography.fernet import Fernet, MultiFernet

    return MultiFernet([Fernet(key) for key in keys])


def encrypt(plain: str) -> str:
    return _fernet(tuple(settings.ENCRYPTION_KEYS)).encrypt(plain.encode()).decode()


def decrypt(cipher: str, keys: Sequence[str] | None = None) -> str:
    """The plain text. Raises DecryptionFailed if none of the keys (by default ENCRYPTION_KEYS) fits."""
    from cryptography.fernet import InvalidToken

    try:
        return _fernet(tuple(keys or settings.ENCRYPTION_KEYS)).decrypt(cipher.encode()).decode()
    except InvalidToken:
        raise DecryptionFailed(HINT) from None


def is_current(cipher: str) -> bool:
    """Whether the first key of ENCRYPTION_KEYS encrypted this value."""
    try:
        decrypt(cipher, settings.ENCRYPTION_KEYS[:1])
    except DecryptionFailed:
        return False
    return True


def require_decrypted(*secrets: str | None) -> None:
    """Raises DecryptionFailed if one of these values of an EncryptedField is LOST."""
    if LOST in secrets:
        raise DecryptionFailed(HINT)


class EncryptedField(models.TextField):
    """Plain text in Python and ciphertext in the database. Queries cannot filter by this field. If no key decrypts the
    ciphertext, the value is ``lost``. It must not be saved: an operator may put the key back. Check what may be LOST
    with ``require_decrypted`` before a use.
    """

    def __init__(self, *args: Any, lost: Any = LOST, **kwargs: Any) -> None:
        self.lost = lost
        super().__init__(*args, **kwargs)

    def get_prep_value(self, value: Any) -> Any:
        require_decrypted(value)
        return None if value is None else encrypt(str(value))

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> Any:
        try:
            return None if value is None else decrypt(value)
        except DecryptionFailed:
            return self.lost
