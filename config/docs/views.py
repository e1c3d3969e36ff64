"""The pages of ``/docs``, their search, and ``/llms.txt``."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from django.conf import settings
from django.http import Http404, HttpRequest, HttpResponse
from django.template.loader import render_to_string
from django.urls import path
from django.views.decorators.http import require_safe

from config.docs import library, markdown

POLICY = (
    "default-src 'none'; style-src 'self'; img-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
QUERY_MAX_CHARS = 100


@require_safe
def page(request: HttpRequest, name: str = "") -> HttpResponse:
    """The page of a Markdown file, or another file of docs as it is. ``NAME.md`` is the Markdown itself."""
    if found := library.page_of(name):
        return answer(found)
    if name not in library.files():
        raise Http404
    file = library.files()[name]
    kind = library.TYPES.get(file.suffix, "text/plain")
    charset = "" if file.suffix == ".png" else "; charset=utf-8"
    # A diagram may have a style of its own.
    headers = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; sandbox"}
    return HttpResponse(file.read_bytes(), content_type=kind + charset, headers=headers)


@require_safe
def search(request: HttpRequest) -> HttpResponse:
    query = request.GET.get("q", "")[:QUERY_MAX_CHARS]
    return shown("docs/search.html", {"title": "Search", "query": query, "results": list(library.search(query))})


@require_safe
def llms(request: HttpRequest) -> HttpResponse:
    """The list of pages for programs, as https://llmstxt.org describes it."""
    lines = ["# Agent workflow service", "", "> Runs AI agents in chats, over an API, with credits and approvals."]
    for group, entries in library.groups().items():
        lines += ["", f"## {group}", ""]
        lines += [f"- [{one.title}]({settings.BASE_URL}{raw(one)}): {one.about}" for one in entries]
    return HttpResponse("\n".join(lines) + "\n", content_type="text/plain; charset=utf-8")


def raw(entry: library.Entry) -> str:
    """The address of the Markdown. A folder without a README has none."""
    return next((f"/docs/{name}" for name, file in library.files().items() if file == entry.file), entry.address)


def answer(file: Path) -> HttpResponse:
    html, headings = rendered(file, file.stat().st_mtime_ns)
    title = headings[0][2] if headings else file.stem
    contents = [heading for heading in headings if heading[0] == 2]
    return shown("docs/page.html", {"title": title, "html": html, "contents": contents, "file": file})


@lru_cache(maxsize=512)
def rendered(file: Path, version: int) -> tuple[str, list[tuple[int, str, str]]]:
    def resolve(link: str) -> str | None:
        target, _, anchor = link.partition("#")
        found = library.address((folder / target).resolve())
        return f"{found}#{anchor}" if found and anchor else found

    folder = file if file.is_dir() else file.parent
    return markdown.render(library.text_of(file), resolve)


def shown(template: str, context: dict[str, object]) -> HttpResponse:
    text = render_to_string(template, {"groups": library.groups(), **context})
    return HttpResponse(text, headers={"Content-Security-Policy": POLICY, "Referrer-Policy": "no-referrer"})


urls = [
    path("docs", page),
    path("docs/", page),
    path("docs/search", search),
    path("docs/<path:name>", page),
    path("llms.txt", llms),
]
