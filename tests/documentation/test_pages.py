"""``/docs``: every Markdown file is a page, every link of a page works, and nothing else of the machine is served."""

from __future__ import annotations

import re
from html import unescape
from typing import Any
from urllib.parse import urlsplit

import pytest

from config.docs import library
from config.docs.markdown import render
from tests.documentation import diagrams

pytestmark = pytest.mark.django_db
NAMES = sorted(name.removesuffix(".md") for name in library.files() if name.endswith(".md"))


@pytest.fixture(scope="module")
def shown() -> dict[str, Any]:
    """The answer of each path. Pages link to each other, so each would be rendered many times."""
    return {}


@pytest.mark.parametrize("name", NAMES)
def test_every_markdown_file_is_a_page_with_working_links(client, shown, name):
    def get(path: str) -> Any:
        if path not in shown:
            shown[path] = client.get(path)
        return shown[path]

    answer = get(f"/docs/{name}")
    assert answer.status_code == 200
    page = answer.content.decode()
    policy = answer["Content-Security-Policy"]
    assert "script-src" not in policy
    assert "unsafe" not in policy
    assert not re.search(r"<script|\sstyle=|\son\w+=", re.sub(r"<code.*?</code>", "", page, flags=re.DOTALL))
    for link in {unescape(link) for link in re.findall(r'(?:href|src|srcset)="([^"]+)"', page)}:
        path, anchor = urlsplit(link).path, urlsplit(link).fragment
        if urlsplit(link).scheme or path.startswith(("/static", "/api", "/admin")):
            continue
        target = get(path) if path else answer
        assert target.status_code == 200, link
        if anchor:
            assert f'id="{anchor}"' in target.content.decode(), link


def test_every_page_is_listed_once(client):
    listed = [entry.file for entries in library.groups().values() for entry in entries]
    assert len(listed) == len(set(listed))
    # A listed folder has a page that lists its pages.
    folders = {file for file in listed if file.is_dir()} | {file.parent for file in listed if file.name == "README.md"}
    pages = {path for name, path in library.files().items() if name.endswith(".md")} - set(listed)
    unlisted = {path for path in pages if not (folders - {library.ROOT}) & set(path.parents)}
    assert unlisted == {library.FOLDER / "README.md"}
    assert all(entry.address for entries in library.groups().values() for entry in entries)


def test_programs_get_a_list_of_pages_in_markdown(client, settings):
    lines = client.get("/llms.txt").content.decode().splitlines()
    assert lines[0] == "# Agent workflow service"
    links = re.findall(r"^- \[.+?\]\((.+?)\): .+$", "\n".join(lines), re.MULTILINE)
    assert len(links) > 15
    for link in links:
        assert link.startswith(settings.BASE_URL)
        answer = client.get(urlsplit(link).path)
        assert answer.status_code == 200
        if link.endswith(".md"):
            assert answer["Content-Type"] == "text/markdown; charset=utf-8"
            assert answer.content.startswith(b"# ")


def test_images_are_served(client):
    answer = client.get("/docs/images/admin-run.png")
    assert (answer.status_code, answer["Content-Type"]) == (200, "image/png")


def test_an_example_is_shown_and_not_executed(client):
    answer = client.get("/docs/prometheus/alerts.yml")
    assert answer["Content-Type"] == "text/plain; charset=utf-8"
    assert "sandbox" in answer["Content-Security-Policy"]


@pytest.mark.parametrize(
    "name",
    [
        "../manage.py",
        "%2e%2e/manage.py",
        "..%2Fmanage.py",
        "//etc/passwd",
        "nothing",
        "api.md.md",
        "a" * 5000,
    ],
)
def test_nothing_else_is_served(client, name):
    assert client.get(f"/docs/{name}").status_code == 404


def test_the_search_finds_sections_by_all_their_words(client):
    page = client.get("/docs/search", {"q": "Rotate SECRET"}).content.decode()
    assert 'href="/docs/webhooks#rotate-the-secret"' in page
    assert page.index("/docs/webhooks#rotate-the-secret") < page.index("/docs/deploy#")
    assert "0 sections" in client.get("/docs/search", {"q": "secret zzzz"}).content.decode()


@pytest.mark.parametrize("query", ["", " ", "a" * 100_000, "<script>", "\x00", "%", "é"])
def test_the_search_takes_any_text(client, query):
    answer = client.get("/docs/search", {"q": query})
    assert answer.status_code == 200
    assert b"<script" not in answer.content
    assert len(answer.content) < 100_000


def test_html_is_text_and_diagrams_have_a_description():
    diagram = "```mermaid\nflowchart LR\n  accTitle: A way\n  accDescr: From a to b.\n  a --> b\n```\n"
    html, headings = render(f"# One\n\n<script>alert(1)</script>\n\n# One\n\n{diagram}", lambda link: None)
    assert "<script" not in html
    assert "<figcaption>From a to b.</figcaption>" in html
    assert re.search(r'<img src="/docs/images/diagram-\w{12}-light.svg" alt="A way">', html)
    assert [anchor for _, anchor, _ in headings] == ["one", "one-1"]


def test_every_diagram_has_the_pictures_of_its_source(client):
    """Otherwise: python -m tests.documentation.diagrams"""
    assert {f"images/{file.name}" for file in library.FOLDER.glob("images/diagram-*.svg")} == set(diagrams.expected())
    for name, (source, _) in diagrams.expected().items():
        answer = client.get(f"/docs/{name}")
        assert (answer.status_code, answer["Content-Type"]) == (200, "image/svg+xml; charset=utf-8")
        drawn = answer.content.decode()
        assert re.search("accDescr: (.+)", source)[1] in unescape(drawn)
        # Pictures of pages load nothing else.
        assert not re.search(r"<script|(?:href|src)=|url\((?!#)|@import", drawn)


def test_pages_need_no_credential_and_accept_no_changes(client):
    assert client.head("/docs").status_code == client.get("/docs/").status_code == 200
    assert client.post("/docs").status_code == 405
