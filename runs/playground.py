"""``/playground``: a page for people that uses only the public API.

Its scripts and styles are in runs/static/playground.
"""

from __future__ import annotations

from django.conf import settings
from django.contrib.auth.views import redirect_to_login
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase
from django.template.loader import render_to_string
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from config.kernel.ids import is_plausible_id


@never_cache
@require_safe
def show(request: HttpRequest, chatId: str = "") -> HttpResponseBase:
    """404 unless PLAYGROUND is on. With PLAYGROUND_STAFF_ONLY, others than staff are sent to the admin's log-in."""
    if not settings.PLAYGROUND or (chatId and not is_plausible_id(chatId)):
        raise Http404
    user = request.user
    if settings.PLAYGROUND_STAFF_ONLY and not (user.is_active and user.is_staff):
        return redirect_to_login(request.path, reverse("admin:login"))
    issues_tokens = not settings.SESSION_ISSUER
    context = {"issues_tokens": issues_tokens, "is_local": settings.EMBEDDED and issues_tokens}
    page = render_to_string("runs/playground.html", context)
    return HttpResponse(page, headers={"Content-Security-Policy": policy(), "Referrer-Policy": "no-referrer"})


def policy() -> str:
    """Only the service's own scripts, styles and pictures. Files may be uploaded to the object storage."""
    reached = " ".join(["'self'", *upload_addresses()])
    return (
        f"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src {reached}; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def upload_addresses() -> list[str]:
    """The bucket in a path and as a part of the host's name, because STORAGE_S3_ADDRESSING=auto uses either."""
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
