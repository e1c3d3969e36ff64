"""The error envelope ``{"error": {…}}`` for every exception, without a stack trace, SQL or a setting."""

import logging
from http import HTTPStatus
from typing import Any

from django.core.exceptions import BadRequest, PermissionDenied, RequestDataTooBig, SuspiciousOperation
from django.http import Http404, HttpResponse
from rest_framework import exceptions

from config.database.retry import CONNECTION_ERRORS
from config.kernel.errors import BY_STATUS, DomainError, InternalError, Unauthorized, ValidationFailed
from config.kernel.jsontext import dumps

logger = logging.getLogger(__name__)

MESSAGE_MAX_CHARS = 500
# DRF's key for errors that belong to no field.
OF_ALL = "non_field_errors"
# The statuses of exceptions that are not the API's own: the first match counts. Others are 500.
STATUSES: list[tuple[type[Exception] | tuple[type[Exception], ...], int]] = [
    (CONNECTION_ERRORS, 503),
    (Http404, 404),
    (RequestDataTooBig, 413),
    (PermissionDenied, 403),
    ((BadRequest, SuspiciousOperation, UnicodeError), 400),
]


def envelope(code: str, message: str, details: Any = None) -> dict[str, Any]:
    error = {"code": code, "message": message}
    return {"error": error if details is None else {**error, "details": details}}


def is_api_path(path: str) -> bool:
    return path == "/api" or path.startswith("/api/")


def response_to(error: DomainError) -> HttpResponse:
    """The answer to an error, outside of DRF."""
    body = dumps(envelope(error.code, error.message, error.details))
    return HttpResponse(body, status=error.status, content_type="application/json", headers=error.headers)


def error_response(status: int) -> HttpResponse:
    """The envelope of a bare HTTP status, outside of DRF."""
    if status in BY_STATUS:
        return response_to(BY_STATUS[status]())
    error = DomainError(HTTPStatus(status).phrase)
    error.status, error.code = status, HTTPStatus(status).name
    return response_to(error)


def plain_response(status: int, headers: dict[str, str] | None = None) -> HttpResponse:
    """A bare HTTP status as text, for pages."""
    message = BY_STATUS[status]().message
    return HttpResponse(f"{message}\n", status=status, content_type="text/plain; charset=utf-8", headers=headers)


def flatten(errors: Any, path: str = "") -> dict[str, list[str]]:
    """DRF's nested validation errors as dotted paths → messages. Errors that belong to no field are under ``""``."""
    if isinstance(errors, dict):
        parts = list(errors.items())
    elif isinstance(errors, list):
        parts = [(index if isinstance(part, (dict, list)) else OF_ALL, part) for index, part in enumerate(errors)]
    else:
        text = str(errors)  # some messages quote the whole value
        return {path: [text if len(text) <= MESSAGE_MAX_CHARS else f"{text[:MESSAGE_MAX_CHARS]}…"]}
    found: dict[str, list[str]] = {}
    for key, part in parts:
        name = path if key == OF_ALL else f"{path}.{key}" if path else str(key)
        for field, messages in flatten(part, name).items():
            found.setdefault(field, []).extend(messages)
    return found


def to_domain_error(error: Exception) -> DomainError:
    """The DomainError that the client gets for this exception."""
    if isinstance(error, DomainError):
        return error
    if isinstance(error, exceptions.ValidationError):
        return ValidationFailed(flatten(error.detail))
    if isinstance(error, (exceptions.NotAuthenticated, exceptions.AuthenticationFailed)):
        return Unauthorized(str(error.detail))
    if isinstance(error, exceptions.APIException):
        status = error.status_code
    else:
        status = next((status for kinds, status in STATUSES if isinstance(error, kinds)), 500)
    return BY_STATUS.get(status, InternalError)(str(error.detail) if isinstance(error, exceptions.ParseError) else None)


def answer_to(error: Exception, failure: str, *about: str) -> HttpResponse:
    """The envelope of an exception, which is logged as ``failure`` if it is our fault."""
    refusal = to_domain_error(error)
    if refusal.status >= 500:
        logger.error(failure, *about, exc_info=error)
    return response_to(refusal)


def exception_handler(error: Exception, context: dict[str, Any]) -> HttpResponse:
    """DRF's EXCEPTION_HANDLER. The answer is JSON, also if the client has asked for another type."""
    return answer_to(error, "%s failed", type(context.get("view")).__name__)
