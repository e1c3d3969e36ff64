"""The files of attachments in Django's storage, and whether a file's bytes agree with its media type. Each attachment
has a folder with random file names. A file whose name is in a row never changes.
"""

import codecs
import hashlib
import logging
import re
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from itertools import chain
from typing import Any

from django.core.files.base import File
from django.core.files.storage import default_storage

from config.kernel.errors import DomainError, Unavailable

logger = logging.getLogger(__name__)

FOLDER = "attachments"
READ_SIZE = 64 * 1024

HEAD_BYTES = 1024
SIGNATURES: dict[str, re.Pattern[bytes]] = {
    "image/png": re.compile(rb"\x89PNG\r\n\x1a\n"),
    "image/jpeg": re.compile(rb"\xff\xd8\xff"),
    "image/gif": re.compile(rb"GIF8[79]a"),
    "image/webp": re.compile(rb"RIFF....WEBP", re.DOTALL),
    # PDF readers accept some bytes before the header.
    "application/pdf": re.compile(rb".{0,1019}?%PDF-", re.DOTALL),
}


@contextmanager
def storage_errors() -> Iterator[None]:
    """Turns errors of the storage into Unavailable; a missing file stays FileNotFoundError."""
    try:
        yield
    except (FileNotFoundError, DomainError):
        raise
    except (IsADirectoryError, NotADirectoryError) as error:
        raise FileNotFoundError from error
    except Exception as error:
        logger.exception("the file storage failed")
        raise Unavailable("The file storage is not available at the moment; try again.") from error


def takes_uploads() -> bool:
    """Whether clients upload to the storage directly, not through this service: ``config.storage.ObjectStorage``."""
    return hasattr(default_storage, "presign_put")


def direct_name(attachment_id: str) -> str:
    """The name of the file that a client uploads to the storage directly: it is part of the signed URL."""
    return f"{FOLDER}/{attachment_id}/upload"


def write(attachment_id: str, content: File, content_type: str) -> str:
    """Store the file, and return its new name. Raises FileNotFoundError if its folder was removed meanwhile."""
    name = f"{FOLDER}/{attachment_id}/{secrets.token_hex(16)}"
    content.content_type = content_type  # type: ignore[attr-defined]  # S3 keeps it with the object
    try:
        with storage_errors():
            return default_storage.save(name, content)
    except BaseException:
        remove(name)
        raise


def read_file(name: str, limit: int, seconds: float) -> bytes:
    """The first ``limit`` bytes. Blocks. Raises FileNotFoundError, and Unavailable also if an object storage takes
    longer than ``seconds``: its own time-out is for each part.
    """
    storage: Any = default_storage
    end, read = time.monotonic() + seconds, list[bytes]()
    with storage_errors():
        if not hasattr(storage, "first_parts"):
            with storage.open(name) as file:
                return bytes(file.read(limit))
        with closing(storage.first_parts(name, limit, READ_SIZE)) as parts:
            for part in parts:
                if time.monotonic() > end:
                    raise Unavailable("The file storage is too slow at the moment; try again.")
                read.append(part)
    return b"".join(read)


def remove(name: str) -> None:
    """Remove a file, if it exists. After a failure ``remove_all`` removes it later."""
    try:
        default_storage.delete(name)
    except Exception as error:
        logger.warning("a file of an attachment was not removed (%s)", type(error).__name__)


def listed(folder: str) -> tuple[list[str], list[str]]:
    """The names of the folders and of the files in ``folder``; empty if another process has removed it."""
    with storage_errors():
        try:
            return default_storage.listdir(folder)
        except FileNotFoundError:
            return [], []


def in_folder(folder: str) -> Iterator[str]:
    """The files in ``folder`` and in the folders within it."""
    folders, names = listed(folder)
    yield from (f"{folder}/{name}" for name in names)
    for inner in folders:
        yield from in_folder(f"{folder}/{inner}")


def remove_folder(folder: str, *, but: str = "") -> None:
    """Remove a folder except the file ``but``. Several processes may do this at the same time. Raises Unavailable."""
    with storage_errors():
        folders, names = listed(folder)
        for inner in folders:
            remove_folder(f"{folder}/{inner}")
        for name in names:
            if f"{folder}/{name}" != but:
                default_storage.delete(f"{folder}/{name}")
        if not but:
            default_storage.delete(folder)  # an empty folder on disk; an object storage has none


def remove_all(attachment_id: str, *, but: str = "") -> None:
    """Remove every file of the attachment except ``but``, also those of interrupted and replaced uploads."""
    remove_folder(f"{FOLDER}/{attachment_id}", but=but)


def is_text(kind: str) -> bool:
    return kind.startswith("text/") or kind == "application/json"


def inspect(parts: Iterable[bytes], kind: str) -> tuple[int, str, str | None]:
    """The size and SHA-256 of a file, which is read once, and why its bytes do not fit its type, or None."""
    digest, size, head = hashlib.sha256(), 0, b""
    problem: str | None = None
    decoder = codecs.getincrementaldecoder("utf-8")()
    for part in chain(parts, [b""]):  # the last part is empty
        digest.update(part)
        size += len(part)
        head += part[: HEAD_BYTES - len(head)]
        if problem is None and is_text(kind):
            try:
                decoder.decode(part, final=not part)
            except UnicodeDecodeError:
                problem = "The file is not text in UTF-8."
            if problem is None and b"\0" in part:
                problem = "The file holds NUL, which text does not."
    signature = SIGNATURES.get(kind)
    if signature is not None and not signature.match(head):
        problem = f"The file does not begin as one of the type {kind} does."
    return size, digest.hexdigest(), problem
