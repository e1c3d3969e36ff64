"""Secrets that the embedded default generates: one file each under ``VAR_DIR``, with mode 0600.

In production, environment variables hold them; ``manage.py check --deploy`` names each one that is missing.
"""

import os
import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path

from cryptography.fernet import Fernet
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat


def random_text() -> str:
    return secrets.token_urlsafe(64)


def fernet_key() -> str:
    return Fernet.generate_key().decode()


def signing_key() -> str:
    """An Ed25519 private key as PEM."""
    return Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


def secret_from_file(path: Path, generate: Callable[[], str] = random_text) -> str:
    """The content of the file, which is made on first use. Processes that start side by side all get the same one."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)  # mkstemp files are 0600
        try:
            with os.fdopen(handle, "w") as file:
                file.write(generate())
            # link, unlike rename, does not replace: the first process wins, and the others read its secret.
            os.link(name, path)
        except FileExistsError:
            pass
        finally:
            os.unlink(name)
    return path.read_text().strip()
