"""Files that tools make: stored with Django's storage API and served at an address that only the run's owner gets.

The address holds an unguessable token, which is also the name of the file's folder. So a request needs no further
check, and old addresses stay valid after a change of SECRET_KEY.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from urllib.parse import quote, unquote, urlsplit

from django.conf import settings
from django.core.files.base import ContentFile
from django.core.files.storage import default_storage
from django.http import FileResponse, HttpRequest
from django.http.response import HttpResponseBase
from django.utils.crypto import salted_hmac

from chats.files import storage_errors
from config.api.errors import error_response, response_to
from config.kernel.errors import MethodNotAllowed, Unavailable
from runs.tools.base import ToolContext, tool_error

FOLDER = "tools"
FILE_NAME_MAX_CHARS = 100
# File systems limit a name to 255 bytes, and the storage may add a few.
FILE_NAME_MAX_BYTES = 200
# No separators, control characters, hidden files, or marks that reverse the text and so disguise the file's type.
FILE_NAME_PATTERN = re.compile(r"^\w(?:[\w .,()+@=-]*[\w)])?$")
TOKEN_PATTERN = re.compile(r"[0-9a-f]{64}")
WRITE_ATTEMPTS = 3

CONTENT_TYPES = {
    "csv": "text/csv; charset=utf-8",
    "htm": "text/html; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "json": "application/json",
    "md": "text/markdown; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
    "xml": "application/xml",
}


def is_file_name(name: str) -> bool:
    """Whether ``name`` is a valid file name on every system: one path component of letters, digits and a few signs."""
    return (
        len(name) <= FILE_NAME_MAX_CHARS
        and len(name.encode("utf-8", "replace")) <= FILE_NAME_MAX_BYTES
        and "\n" not in name
        and FILE_NAME_PATTERN.search(name) is not None
    )


async def store_file(context: ToolContext, file_name: str, content: bytes) -> str:
    """Store the file of a call and return its URL. Raises ToolFailure."""
    return await context.file_threads.run(context.user_id, store, context.invocation_id, file_name, content)


def store(invocation_id: str, file_name: str, content: bytes) -> str:
    """Store the file and return its URL, which is the same for the same invocation and name: a repeat replaces the
    file.

    Raises ValueError for a bad file name and ToolFailure if the storage fails.
    """
    if not is_file_name(file_name):
        raise ValueError("This is not a valid file name.")
    token = _token(invocation_id, file_name)
    path = f"{FOLDER}/{token}/{file_name}"
    try:
        _write(path, content, content_type(file_name))
    except Exception as error:
        raise tool_error("The file could not be stored.") from error
    return f"{settings.BASE_URL}/files/{token}/{quote(file_name)}"


def _token(invocation_id: str, file_name: str) -> str:
    return salted_hmac("runs.tools.files", f"{invocation_id}/{file_name}", algorithm="sha256").hexdigest()


def remove(invocation_id: str, file_name: str, urls: Iterable[str]) -> None:
    """Delete a call's file, both at its recorded address (SECRET_KEY may have changed since) and at the address of an
    attempt that was not recorded. Raises Unavailable.
    """
    if not is_file_name(file_name):
        return
    tokens = {_token(invocation_id, file_name)}
    for url in urls:
        token, _, name = urlsplit(url).path.rpartition("/files/")[2].partition("/")
        if TOKEN_PATTERN.fullmatch(token) and unquote(name) == file_name:
            tokens.add(token)
    try:
        for token in tokens:
            default_storage.delete(f"{FOLDER}/{token}/{file_name}")
            # The empty folder stays behind on a disk. An object storage has no folders.
            with contextlib.suppress(OSError):
                default_storage.delete(f"{FOLDER}/{token}")
    except Exception as error:
        raise Unavailable("The file storage is not available at the moment; try again.") from error


def content_type(file_name: str) -> str:
    """The content type for the file name's ending."""
    return CONTENT_TYPES.get(file_name.rpartition(".")[2].lower(), "application/octet-stream")


def _write(path: str, content: bytes, kind: str) -> None:
    for _ in range(WRITE_ATTEMPTS):
        # An earlier attempt may have left an incomplete file.
        if default_storage.exists(path):
            default_storage.delete(path)
        file = ContentFile(content)
        file.content_type = kind  # type: ignore[attr-defined]  # S3 keeps it with the object
        saved = default_storage.save(path, file)
        if saved == path:
            return
        # Another attempt of the same call wrote the path meanwhile, so the storage chose another name.
        default_storage.delete(saved)
    raise OSError("another attempt is writing the file")


def serve_file(request: HttpRequest, token: str, file_name: str) -> HttpResponseBase:
    """``GET /files/{token}/{fileName}``: always a download, never a page of this origin."""
    if request.method not in ("GET", "HEAD"):
        return response_to(MethodNotAllowed(headers={"Allow": "GET, HEAD"}))
    if not TOKEN_PATTERN.fullmatch(token) or not is_file_name(file_name):
        return error_response(404)
    try:
        with storage_errors():
            file = default_storage.open(f"{FOLDER}/{token}/{file_name}")
    except FileNotFoundError:
        return error_response(404)
    except Unavailable as error:
        return response_to(error)
    return FileResponse(
        file,
        as_attachment=True,
        filename=file_name,
        content_type=content_type(file_name),
        headers={
            "Cache-Control": f"private, max-age={settings.TOOL_FILE_MAX_AGE_SECONDS}",
            "Content-Security-Policy": "sandbox; default-src 'none'; style-src 'unsafe-inline'",
            "X-Content-Type-Options": "nosniff",
        },
    )
