"""``/docs``: the site that mkdocs builds, or the Markdown files, and nothing else of the machine."""

import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest

import mkdocs_hooks
from config.api import documentation
from tests.documentation import diagrams
from tests.stack.process import ROOT

NAMES = sorted(path.relative_to(documentation.FOLDER).as_posix() for path in documentation.FOLDER.rglob("*.md"))
# What would be loaded from elsewhere; links to other sites are fine.
FOREIGN = re.compile(r"""<(?:script|img|link(?![^>]*rel="canonical"))[^>]+(?:src|href)="?(?:https?:)?//""")

pytestmark = pytest.mark.django_db


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def site(built: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    show(monkeypatch, built)
    return built


@pytest.fixture
def no_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    show(monkeypatch, tmp_path / "none")


def show(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(documentation, "SITE", folder)
    documentation.files.cache_clear()


@pytest.fixture(autouse=True)
def forget():
    yield
    documentation.files.cache_clear()


def test_every_markdown_file_is_a_page_that_loads_nothing_from_elsewhere(site, client):
    for name in [*NAMES, "readme.md", "changelog.md", "reporting.md"]:
        address = f"/docs/{name.removesuffix('.md').removesuffix('README')}"
        answer = client.get(address, follow=True)
        assert (answer.status_code, answer["Content-Type"]) == (200, "text/html; charset=utf-8"), name
        assert not FOREIGN.search(answer.content.decode()), name
        assert answer.request["PATH_INFO"].endswith("/")
    assert "'unsafe-inline'" in answer["Content-Security-Policy"]
    assert client.get("/docs/search/search_index.json")["Content-Type"] == "application/json"
    assert client.get("/docs/images/admin-run.png")["Content-Type"] == "image/png"


def test_diagrams_are_pictures_and_other_files_are_no_links(site):
    page = (site / "architecture" / "index.html").read_text()
    assert {f"{scheme}.svg#only-{scheme}" for scheme in ("light", "dark")} <= set(
        re.findall(r"-((?:light|dark)\.svg#only-\w+)", page)
    )
    assert "mermaid" not in page
    for file in (site / "readme" / "index.html", site / "deploy" / "index.html"):
        links = re.findall(r'href="([^"]+)"', file.read_text())
        assert not [link for link in links if link.endswith(("Procfile", ".py", ".yaml"))]


def test_an_example_is_shown_and_not_executed(site, client):
    for name in ("examples/chat.html", "examples/chat.py", "prometheus/alerts.yml"):
        assert client.get(f"/docs/{name}")["Content-Type"] == "text/plain; charset=utf-8"


def test_without_the_site_the_files_are_shown(no_site, client):
    for path, name in (("", "README.md"), ("/", "README.md"), ("/operations", "operations.md"), ("/api.md", "api.md")):
        answer = client.get(f"/docs{path}")
        assert (answer.status_code, answer["Content-Type"]) == (200, "text/plain; charset=utf-8")
        assert answer.content == (documentation.FOLDER / name).read_bytes()


@pytest.mark.parametrize(
    "name", ["../manage.py", "%2e%2e/manage.py", "..%2Fmanage.py", "//etc/passwd", "nothing", "api.md.md", "a" * 5000]
)
def test_nothing_else_is_served(no_site, client, name):
    assert client.get(f"/docs/{name}").status_code == 404


def test_pages_need_no_credential_and_accept_no_changes(no_site, client):
    assert client.head("/docs").status_code == 200
    assert client.post("/docs").status_code == 405


def test_every_page_is_listed_once():
    nav = mkdocs_hooks.on_config(type("Config", (), {})()).nav
    listed: list[str] = []
    for group in nav:
        for entries in group.values():
            for entry in entries:
                pages = [entry] if isinstance(entry, str) else next(iter(entry.values()))
                listed += [pages] if isinstance(pages, str) else pages
    assert sorted(listed) == sorted([*NAMES, *mkdocs_hooks.BESIDE.values()])


def test_every_diagram_has_the_pictures_of_its_source():
    """Otherwise: python -m tests.documentation.diagrams"""
    folder = documentation.FOLDER
    assert {f"images/{file.name}" for file in folder.glob("images/diagram-*.svg")} == set(diagrams.expected())
    for name, (source, _) in diagrams.expected().items():
        drawn = (folder / name).read_text()
        assert re.search("accDescr: (.+)", source)[1] in unescape(drawn)
        # Pictures of pages load nothing else.
        assert not re.search(r"<script|(?:href|src)=|url\((?!#)|@import", drawn)
