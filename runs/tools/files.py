"""Files that tools make, in one folder for each call. ``runs.pages`` serves them at an address with an unguessable
token, which only the run's owner gets. The stored path holds the token: addresses stay valid if SECRET_KEY changes.
"""

import re
from dataclasses import replace
from urllib.parse import quote

from django.conf import settings
from django.core.files.base import ContentFile
from django.core.files.storage import default_storage
from django.utils.crypto import salted_hmac

from chats.files import SIGNATURES, remove_folder
from runs.tools import base
from runs.tools.base import ToolContext, ToolFailure, ToolImage, ToolResult, tool_error

FOLDER = "tools"
FILE_NAME_MAX_CHARS = 100
FILE_NAME_MAX_BYTES = 200  # file systems limit a name to 255 bytes, and the storage may add a few
# No separators, control characters, hidden files, or marks that reverse the text and so disguise the file's type.
FILE_NAME_PATTERN = re.compile(r"\w(?:[\w .,()+@=-]*[\w)])?")
TOKEN_PATTERN = re.compile(r"[0-9a-f]{64}")

# The types of images that models accept, with the endings of their file names.
IMAGE_TYPES = {"image/gif": "gif", "image/jpeg": "jpg", "image/png": "png", "image/webp": "webp"}
TEXT_TYPES = {"csv": "csv", "htm": "html", "html": "html", "md": "markdown", "txt": "plain"}
CONTENT_TYPES = {ending: kind for kind, ending in IMAGE_TYPES.items()}
CONTENT_TYPES |= {ending: f"text/{kind}; charset=utf-8" for ending, kind in TEXT_TYPES.items()}
CONTENT_TYPES |= {"json": "application/json", "svg": "image/svg+xml", "xml": "application/xml"}


def is_file_name(name: str) -> bool:
    """Whether ``name`` is a valid file name on every system: one path component of letters, digits and a few signs."""
    is_short = len(name) <= FILE_NAME_MAX_CHARS and len(name.encode("utf-8", "replace")) <= FILE_NAME_MAX_BYTES
    return is_short and FILE_NAME_PATTERN.fullmatch(name) is not None


async def store_file(context: ToolContext, file_name: str, content: bytes) -> str:
    """Store the file of a call and return its URL. Raises ToolFailure."""
    return await context.file_threads.run(context.user_id, store, context.invocation_id, file_name, content)


def store(invocation_id: str, file_name: str, content: bytes) -> str:
    """Store the file, in place of an earlier one with this name, and return its URL. Raises ToolFailure."""
    path, url = _place(invocation_id, file_name)
    file = ContentFile(content)
    file.content_type = content_type(file_name)  # type: ignore[attr-defined]  # S3 keeps it with the object
    try:
        default_storage.save(path, file)
    except Exception as error:
        raise tool_error("The file could not be stored.") from error
    return url


def image_of(content: bytes, kind: str) -> ToolImage | None:
    """An image that a tool returned; None if models do not accept its type, or if its bytes do not have this type."""
    kind = kind.partition(";")[0].strip().lower()
    fits = kind in IMAGE_TYPES and SIGNATURES[kind].match(content)
    return (content, kind) if fits else None


async def store_images(context: ToolContext, result: ToolResult) -> ToolResult:
    """The result with its images stored as files, whose addresses models and users get."""
    text, urls = [result.text] if result.text else [], list(result.urls)
    for number, (content, kind) in enumerate(result.images[: base.TOOL_RESULT_URLS_MAX], 1):
        name = f"image-{number}.{IMAGE_TYPES[kind]}"
        try:
            urls.append(await store_file(context, name, content))
            text.append(f"[{name}]")
        except ToolFailure:
            text.append(f"[{name}, which could not be stored]")
    return replace(result, text="\n".join(text), urls=tuple(urls), images=())


def stored_image(invocation_id: str, url: str) -> tuple[str, str, str] | None:
    """The storage name, file name and content type of an image that this call stored; None for other addresses."""
    name = url.rpartition("/")[2]
    kind = content_type(name)
    if kind not in IMAGE_TYPES or not is_file_name(name):
        return None
    path, own = _place(invocation_id, name)
    return (path, name, kind) if url == own else None


def _place(invocation_id: str, file_name: str) -> tuple[str, str]:
    """The storage name and the URL."""
    token = salted_hmac("runs.tools.files", f"{invocation_id}/{file_name}", algorithm="sha256").hexdigest()
    place = f"{invocation_id}/{token}"
    return f"{FOLDER}/{place}/{file_name}", f"{settings.BASE_URL}/files/{place}/{quote(file_name)}"


def stored_name(invocation_id: str, token: str, file_name: str) -> str | None:
    """The storage name; None if there can be no such file."""
    if TOKEN_PATTERN.fullmatch(token) and is_file_name(file_name):
        return f"{FOLDER}/{invocation_id}/{token}/{file_name}"
    return None


def remove_all(invocation_id: str) -> None:
    """Delete every file of a call, also those of attempts that were not recorded. Raises Unavailable."""
    remove_folder(f"{FOLDER}/{invocation_id}")


def content_type(file_name: str) -> str:
    return CONTENT_TYPES.get(file_name.rpartition(".")[2].lower(), "application/octet-stream")
