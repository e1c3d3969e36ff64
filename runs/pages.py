"""Pages beside the admin (``/`` and the playground, which uses only the public API: runs/static/playground), and
addresses that are credentials: of parked calls (``/api/callbacks/…``) and of files of tools (``/files/…``).
"""

from django.conf import settings
from django.contrib.auth.views import redirect_to_login
from django.core.files.storage import default_storage
from django.http import FileResponse, Http404, HttpRequest, HttpResponse, HttpResponseBase
from django.template.loader import render_to_string
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_safe

from chats.files import storage_errors
from config.api import ratelimit
from config.api.views import PAGE_POLICY
from config.kernel import clock
from config.kernel.encryption import LOST
from config.kernel.errors import MethodNotAllowed, NotFound, PayloadTooLarge, Unauthorized, Unavailable
from config.kernel.ids import is_plausible_id
from config.kernel.jsontext import dumps
from config.limits.window import Bucket
from config.telemetry import logs
from runs import services
from runs.models import Tool, ToolInvocation
from runs.tools import files, http
from runs.tools.base import parse_signing_secret

CALLBACKS_PER_MINUTE = 60  # for each call
FILE_HEADERS = {
    "Cache-Control": "private, no-cache",
    "Content-Security-Policy": "sandbox; default-src 'none'; style-src 'unsafe-inline'",
    "X-Content-Type-Options": "nosniff",
}


@csrf_exempt
def receive_callback(request: HttpRequest, token: str) -> HttpResponse:
    """The answer 200 says, after the commit, whether the callback was accepted."""
    # Django logs the path of a failed request, and this one is a credential.
    request.path = request.path_info = http.CALLBACK_PATH
    if request.method != "POST":
        raise MethodNotAllowed(headers={"Allow": "POST"})
    call_id, signed = http.call_of(token)
    call = ToolInvocation.objects.filter(pk=call_id).defer("result", "input").first() if call_id else None
    if call is None:
        ratelimit.refuse_if_over(ratelimit.charge_address(request))
        raise NotFound
    ratelimit.charge_caller(request, Bucket(f"callback:{call.pk}", CALLBACKS_PER_MINUTE))
    logs.run_id.set(call.run_id)
    size = int(request.META.get("CONTENT_LENGTH") or 0)
    if size > settings.TOOL_ANSWER_MAX_BYTES:
        raise PayloadTooLarge(f"A callback has at most {settings.TOOL_ANSWER_MAX_BYTES} bytes.")
    body = request.read(size)
    tool = Tool.objects.only("signing_secret", "unsigned_callbacks").filter(name=call.name).first()
    if tool is not None and tool.signing_secret == LOST:
        raise Unavailable
    if tool is None and signed:  # the tool had to sign when the call was made
        raise Unauthorized("The tool that is to sign the callback is gone.")
    secret = "" if tool is None or tool.unsigned_callbacks else parse_signing_secret(tool.signing_secret)
    if secret and not http.is_signed(request.headers, body, secret, clock.now().timestamp()):
        raise Unauthorized("The callback has no valid signature, or one that is too old.")
    said = http.read_callback(body, request.headers.get("Content-Type", ""), name=call.name, price=call.credit_estimate)
    call, accepted = services.record_callback(call, said)
    became = {"toolInvocationId": call.pk, "status": call.status, "accepted": accepted}
    return HttpResponse(dumps(became), content_type="application/json")


def serve_file(request: HttpRequest, invocation_id: str, token: str, file_name: str) -> HttpResponseBase:
    """The file, always as a download. 404 once the chat is deleted or its user is inactive."""
    if request.method not in ("GET", "HEAD"):
        raise MethodNotAllowed(headers={"Allow": "GET, HEAD"})
    name = files.stored_name(invocation_id, token, file_name) if is_plausible_id(invocation_id) else None
    calls = ToolInvocation.objects.filter(pk=invocation_id, run__chat__deleted_at=None, run__user__is_active=True)
    try:
        if name is None or not calls.exists():
            raise FileNotFoundError
        kind = files.content_type(file_name)
        with storage_errors():  # an object storage sends the file when the response reads its size
            file = default_storage.open(name)
            return FileResponse(file, as_attachment=True, filename=file_name, content_type=kind, headers=FILE_HEADERS)
    except FileNotFoundError:
        ratelimit.refuse_if_over(ratelimit.charge_address(request))
        raise NotFound from None


LINKS = (
    ("/playground", "Playground", "start a run and watch it live"),
    ("/docs", "Documentation", "how to use, extend and run this service"),
    ("/api/docs", "API documentation", "every operation of both surfaces, with examples"),
    ("/api/schema?format=json", "OpenAPI document", "for generators of clients"),
    ("/admin/", "Admin", "for staff: runs, users, credits, models and tools"),
    ("/readyz", "Readiness", "whether this process can serve requests, as JSON"),
)


@require_safe
def show_front(request: HttpRequest) -> HttpResponse:
    page = render_to_string("runs/front.html", {"links": LINKS if settings.PLAYGROUND else LINKS[1:]})
    return HttpResponse(page, headers={"Content-Security-Policy": PAGE_POLICY, "Referrer-Policy": "no-referrer"})


@never_cache
@require_safe
def show_playground(request: HttpRequest, chatId: str = "") -> HttpResponseBase:
    """404 unless PLAYGROUND is on. With PLAYGROUND_STAFF_ONLY, only staff see it; others are sent to the log-in."""
    if not settings.PLAYGROUND or (chatId and not is_plausible_id(chatId)):
        raise Http404
    user = request.user
    if settings.PLAYGROUND_STAFF_ONLY and not (user.is_active and user.is_staff):
        return redirect_to_login(request.path, reverse("admin:login"))
    issues_tokens = not settings.SESSION_ISSUER
    context = {"issues_tokens": issues_tokens, "is_local": settings.EMBEDDED and issues_tokens}
    # Uploads may go to the object storage.
    reached = ["'self'", *upload_addresses()]
    policy = (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        f"connect-src {' '.join(reached)}; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    page = render_to_string("runs/playground.html", context)
    return HttpResponse(page, headers={"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer"})


def upload_addresses() -> list[str]:
    """The addresses of the bucket: in the path and in the host name, because STORAGE_S3_ADDRESSING=auto uses either."""
    bucket, region = settings.STORAGE_S3_BUCKET, settings.STORAGE_S3_REGION
    if not bucket:
        return []
    if settings.STORAGE_S3_ENDPOINT:
        bases = [settings.STORAGE_S3_ENDPOINT.rstrip("/")]
    else:
        domain = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
        # The SDK signs URLs for the region's host or for the global one.
        bases = [f"https://s3.{region}.{domain}", f"https://s3.{domain}"]
    return [one for base in bases for one in (f"{base}/{bucket}/", f"{base}/".replace("://", f"://{bucket}."))]
