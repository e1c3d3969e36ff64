"""The errors by which domain code rejects a request, each with code and message. Apps have subclasses of their own."""


class DomainError(Exception):
    """A rejected request. ``status`` is the HTTP status, ``code`` is stable for clients, ``message`` is for people."""

    status = 400
    code = "VALIDATION_ERROR"
    message = "The request is not valid."

    def __init__(
        self, message: str | None = None, *, details: dict | None = None, headers: dict[str, str] | None = None
    ) -> None:
        self.message, self.details, self.headers = message or self.message, details, headers or {}
        super().__init__(self.message)


class ValidationFailed(DomainError):
    """400 with ``details.fields``: each field's dotted path to its messages."""

    def __init__(self, fields: dict[str, list[str]], message: str | None = None) -> None:
        """Without a ``message`` it names the first field."""
        first = next((f"{name}: {' '.join(texts)}" for name, texts in fields.items() if texts), None)
        super().__init__(message or first, details={"fields": fields})


class Unauthorized(DomainError):
    status, code, message = 401, "UNAUTHORIZED", "A valid credential is required."

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message, headers={"WWW-Authenticate": "Bearer"})


class Forbidden(DomainError):
    status, code, message = 403, "FORBIDDEN", "Not allowed."


class NotFound(DomainError):
    status, code, message = 404, "NOT_FOUND", "Not found."


class MethodNotAllowed(DomainError):
    status, code, message = 405, "METHOD_NOT_ALLOWED", "The method is not allowed here."


class NotAcceptable(DomainError):
    status, code, message = 406, "NOT_ACCEPTABLE", "Only application/json is served here."


class Conflict(DomainError):
    status, code, message = 409, "CONFLICT", "The request conflicts with the current state."


class PayloadTooLarge(DomainError):
    status, code, message = 413, "PAYLOAD_TOO_LARGE", "The request body is too large."


class UnsupportedMediaType(DomainError):
    status, code, message = 415, "UNSUPPORTED_MEDIA_TYPE", "The body must be application/json."


class RateLimited(DomainError):
    status, code, message = 429, "RATE_LIMITED", "Too many requests; try again later."


class HeadersTooLarge(DomainError):
    status, code, message = 431, "HEADERS_TOO_LARGE", "The request's headers are too large."


class InternalError(DomainError):
    status, code, message = 500, "INTERNAL_ERROR", "Something went wrong on our side."


class Unavailable(DomainError):
    status, code, message = 503, "UNAVAILABLE", "The service is not available at the moment; try again."


# The class for an error of which only the HTTP status is known. The apps define their subclasses later.
_KINDS: list[type[DomainError]] = [*DomainError.__subclasses__(), DomainError]
BY_STATUS = {kind.status: kind for kind in _KINDS}
