"""Generated secrets for local use: one file per secret in ``VAR_DIR``, with mode 0600. In production, environment
variables set them. cryptography, which takes 7 MiB, is imported only to generate one.
"""

import contextlib
import os
import secrets
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path


def fernet_key() -> str:
    from cryptography.fernet import Fernet

    return Fernet.generate_key().decode()


def signing_key() -> str:
    """An Ed25519 private key as PEM."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


def secret_from_file(path: Path, generate: Callable[[], str] = lambda: secrets.token_urlsafe(64)) -> str:
    """The file's content, the same for all processes. The first call creates the file. An error ends the process."""
    try:
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=path.parent) as file:  # it has mode 0600
                file.write(generate())
                file.flush()
                # Unlike rename, link does not replace a file: one process creates it, and the others read it.
                with contextlib.suppress(FileExistsError):
                    os.link(file.name, path)
        return path.read_text().strip()
    except OSError as error:
        sys.exit(f"Set VAR_DIR to a directory that this process can read and write: {error}")
