"""``/``: the front page, with links to what the service has for people."""

from __future__ import annotations

import re
from base64 import b64encode
from functools import cache
from hashlib import sha256

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.template.loader import render_to_string
from django.views.decorators.http import require_safe

LINKS = (
    ("/docs", "Documentation", "how to use, extend and run this service"),
    ("/api/docs", "API documentation", "every operation of both surfaces, with examples"),
    ("/api/schema?format=json", "OpenAPI document", "for generators of clients"),
    ("/admin/", "Admin", "for staff: runs, users, credits, models and tools"),
    ("/readyz", "Readiness", "whether this process can serve requests, as JSON"),
)
PLAYGROUND = ("/playground", "Playground", "start a run and watch it live")


@require_safe
def show(request: HttpRequest) -> HttpResponse:
    page, policy = read_page(settings.PLAYGROUND)
    return HttpResponse(page, headers={"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer"})


@cache
def read_page(playground: bool) -> tuple[str, str]:
    """The page and its policy, which allows its own style only."""
    page = render_to_string("runs/front.html", {"links": [*([PLAYGROUND] if playground else []), *LINKS]})
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    digest = b64encode(sha256(style.encode()).digest()).decode()
    allowed = f"style-src 'sha256-{digest}'"
    return page, f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
