"""``GET /files/…``: downloads of the files that tools made. The address is the credential."""

from django.core.files.storage import default_storage
from django.http import FileResponse, HttpRequest
from django.http.response import HttpResponseBase

from chats.files import storage_errors
from config.api import ratelimit
from config.api.errors import answers_errors
from config.kernel.errors import MethodNotAllowed, NotFound
from config.kernel.ids import is_plausible_id
from runs.models import ToolInvocation
from runs.tools import files


@answers_errors("a download failed")
def serve_file(request: HttpRequest, invocation_id: str, token: str, file_name: str) -> HttpResponseBase:
    """Always a download, never a page of this origin. 404 once the chat is deleted or its user is inactive."""
    if request.method not in ("GET", "HEAD"):
        raise MethodNotAllowed(headers={"Allow": "GET, HEAD"})
    try:
        return _serve(invocation_id, token, file_name)
    except (NotFound, FileNotFoundError):
        ratelimit.refuse_if_over(ratelimit.charge_address(request))
        raise NotFound from None


def _serve(invocation_id: str, token: str, file_name: str) -> HttpResponseBase:
    name = files.stored_name(invocation_id, token, file_name) if is_plausible_id(invocation_id) else None
    calls = ToolInvocation.objects.filter(pk=invocation_id, run__chat__deleted_at=None, run__user__is_active=True)
    if name is None or not calls.exists():
        raise NotFound
    with storage_errors():
        file = default_storage.open(name)
    return FileResponse(
        file,
        as_attachment=True,
        filename=file_name,
        content_type=files.content_type(file_name),
        headers={
            "Cache-Control": "private, no-cache",
            "Content-Security-Policy": "sandbox; default-src 'none'; style-src 'unsafe-inline'",
            "X-Content-Type-Options": "nosniff",
        },
    )
