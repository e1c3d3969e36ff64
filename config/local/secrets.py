"""Secrets that the embedded default makes for itself: one file each under ``var/``, mode 0600.

Production gives them as environment variables instead; ``manage.py check --deploy`` says so where it does not.
"""

import os
import secrets
import tempfile
from pathlib import Path

from cryptography.fernet import Fernet


def secret_from_file(path: Path, fernet: bool = False) -> str:
    """The file's content; made on first use. Processes that start side by side all end with the same one."""
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        pass
    return write_once(path, Fernet.generate_key().decode() if fernet else secrets.token_urlsafe(64))


def write_once(path: Path, content: str) -> str:
    """Write ``content`` to ``path`` unless it exists already; either way return what is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent)  # mkstemp files are 0600
    try:
        with os.fdopen(handle, "w") as file:
            file.write(content)
        # link, unlike rename, refuses to replace: the first process wins and the others read its secret.
        os.link(name, path)
    except FileExistsError:
        pass
    finally:
        os.unlink(name)
    return path.read_text().strip()
