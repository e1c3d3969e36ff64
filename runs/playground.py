"""``/playground``: the page of docs/examples that starts a run and shows it live."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import lru_cache

from django.conf import settings
from django.http import Http404, HttpRequest, HttpResponse
from django.views.decorators.http import require_safe

PAGE = settings.BASE_DIR / "docs" / "examples" / "playground.html"


@require_safe
def show(request: HttpRequest) -> HttpResponse:
    """404 unless PLAYGROUND is on."""
    if not settings.PLAYGROUND:
        raise Http404
    page, policy = read_page(PAGE.stat().st_mtime_ns)
    return HttpResponse(
        page, headers={"Content-Security-Policy": policy, "Cache-Control": "no-cache", "Referrer-Policy": "no-referrer"}
    )


@lru_cache(maxsize=1)
def read_page(version: int) -> tuple[str, str]:
    """The page, and a policy that allows only the page's own script and style, by their digests."""
    page = PAGE.read_text()
    policy = (
        f"default-src 'none'; script-src {digests(page, 'script')}; style-src {digests(page, 'style')}; "
        "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return page, policy


def digests(page: str, tag: str) -> str:
    parts = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()}'" for part in parts)
