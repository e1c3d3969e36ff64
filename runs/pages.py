"""Pages beside the admin: ``/`` and the playground, which uses only the public API (runs/static/playground)."""

from django.conf import settings
from django.contrib.auth.views import redirect_to_login
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase
from django.template.loader import render_to_string
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from config.api.views import PAGE_POLICY
from config.kernel.ids import is_plausible_id

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
