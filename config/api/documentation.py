"""``/docs``: the site that ``make site`` builds from the folder docs; without it, the plain Markdown files."""

import mimetypes
from functools import cache
from pathlib import Path

from django.conf import settings
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.views.decorators.http import conditional_page, require_safe

SITE, FOLDER = Path(settings.BASE_DIR, "var", "site"), Path(settings.BASE_DIR, "docs")
INDEX = "index.html"


@cache
def files() -> dict[str, Path]:
    """All files below ``/docs/``, by name. No other file of the machine can be read."""
    root = SITE if (SITE / INDEX).is_file() else FOLDER
    return {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()}


@conditional_page
@require_safe
def page(request: HttpRequest, name: str = "") -> HttpResponse:
    base = name.rstrip("/")
    candidates = (name, f"{base}/{INDEX}".lstrip("/"), f"{base}.md", f"{base}/README.md".lstrip("/"))
    found = next((candidate for candidate in candidates if candidate in files()), None)
    if found is None:
        raise Http404
    is_page = Path(found).name == INDEX
    if is_page and not request.path_info.endswith("/"):
        # The links of a page are relative to its folder.
        return HttpResponseRedirect(f"{request.path_info}/")
    kind = mimetypes.guess_type(found)[0] or "text/plain"
    # An example is shown and not executed.
    shown = kind if is_page or not kind.startswith("text/") or kind in ("text/css", "text/javascript") else "text/plain"
    charset = "; charset=utf-8" if shown.startswith("text/") else ""
    return HttpResponse(files()[found].read_bytes(), content_type=shown + charset)
