"""Media types, and whether a file's bytes agree with its type. No storage and no database here."""

import codecs
import hashlib
import re
from collections.abc import Iterable

from django.conf import settings

MEDIA_TYPE_MAX_CHARS = 127
_NAME = r"[a-z0-9][a-z0-9!#$&^_.+-]{0,62}"
# Without re.ASCII, "ſ" and "ı" would count as letters, which no header can contain.
MEDIA_TYPE = re.compile(rf"({_NAME}/{_NAME})", re.IGNORECASE | re.ASCII)
# Text must be UTF-8, so the parameter need not be stored.
_CHARSET = re.compile(r"""[ \t]*;[ \t]*charset[ \t]*=[ \t]*"?utf-?8"?[ \t]*""", re.IGNORECASE)

HEAD_BYTES = 1024
SIGNATURES: dict[str, re.Pattern[bytes]] = {
    "image/png": re.compile(rb"\x89PNG\r\n\x1a\n"),
    "image/jpeg": re.compile(rb"\xff\xd8\xff"),
    "image/gif": re.compile(rb"GIF8[79]a"),
    "image/webp": re.compile(rb"RIFF....WEBP", re.DOTALL),
    # PDF readers accept some bytes before the header.
    "application/pdf": re.compile(rb".{0,1019}?%PDF-", re.DOTALL),
}


def media_type(text: str) -> str | None:
    """The type in lower case without parameters; None if it is malformed or names a charset other than UTF-8."""
    match = MEDIA_TYPE.match(text)
    if match is None or len(match[0]) > MEDIA_TYPE_MAX_CHARS:
        return None
    rest = text[match.end() :]
    return match[0].lower() if not rest or _CHARSET.fullmatch(rest) else None


def is_allowed(kind: str) -> bool:
    """Whether ATTACHMENT_TYPES has the type, or all types of its family."""
    family = kind.partition("/")[0]
    return any(allowed.lower() in (kind, f"{family}/*") for allowed in settings.ATTACHMENT_TYPES)


def is_text(kind: str) -> bool:
    return kind.startswith("text/") or kind == "application/json"


def inspect(parts: Iterable[bytes], kind: str) -> tuple[int, str, str | None]:
    """The size and SHA-256 of a file, which is read once, and why its bytes do not fit its type, or None."""
    digest = hashlib.sha256()
    size = 0
    head = b""
    problem: str | None = None
    decoder = codecs.getincrementaldecoder("utf-8")() if is_text(kind) else None
    for part in parts:
        digest.update(part)
        size += len(part)
        if len(head) < HEAD_BYTES:
            head += part[: HEAD_BYTES - len(head)]
        if decoder is not None and problem is None:
            problem = _text_problem(decoder, part)
    if decoder is not None and problem is None:
        problem = _text_problem(decoder, b"", final=True)
    signature = SIGNATURES.get(kind)
    if signature is not None and not signature.match(head):
        problem = f"The file does not begin as one of the type {kind} does."
    return size, digest.hexdigest(), problem


def _text_problem(decoder: codecs.IncrementalDecoder, part: bytes, final: bool = False) -> str | None:
    try:
        decoder.decode(part, final)
    except UnicodeDecodeError:
        return "The file is not text in UTF-8."
    return "The file holds NUL, which text does not." if b"\0" in part else None
