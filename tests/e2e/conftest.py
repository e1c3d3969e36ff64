"""A service whose playground is open to everyone, for all tests of it."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page

from tests.playground import WIDE
from tests.stack.browser import ABORTED, watching
from tests.stack.plugin import given_services
from tests.stack.stack import Stack

# Run workers sweep for themselves, and wake those runs whose waits are over.
NOT_NEEDED = ("webhooks", "maintenance", "beat")
AGENTS = """
agents:
  - {name: support, displayName: Support, instructions: Help., tools: [calculate, ask_user]}
  - {name: writer, displayName: Writer, instructions: Write., model: demo, tools: []}
"""


PREPARE = """
from django.core.management import call_command
for file in {files!r}:
    call_command("catalogue", "apply", file)
call_command("session_token", "ada", "--create")
call_command("grant_credits", "ada", "10000", "--reason", "tests")
"""


@pytest.fixture(scope="package")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    environment = {"PLAYGROUND": "1", "PLAYGROUND_STAFF_ONLY": "0"}
    files = [tmp_path_factory.mktemp("catalogue") / name for name in ("agents.yaml", "newer.yaml")]
    for file, text in zip(files, (AGENTS, AGENTS.replace("Help.", "Help well.")), strict=True):
        file.write_text(text)
    prepare = PREPARE.format(files=[str(file) for file in files])
    with Stack(**given_services(), environment=environment, prepare=prepare, without=NOT_NEEDED) as running:
        yield running


@pytest.fixture(scope="module")
def tab(browser: Browser) -> Iterator[Page]:
    with browser.new_page() as tab:
        yield tab


@pytest.fixture
def page(tab: Page, service: Stack, request: pytest.FixtureRequest) -> Iterator[Page]:
    """The playground, signed out. All tests of a module use one tab, because a new one costs more than most tests do.
    A parameter is what Chromium may say during the test.
    """
    tab.set_viewport_size(WIDE)
    try:
        with watching(tab, service.url, getattr(request, "param", ABORTED)):
            tab.goto(f"{service.url}/playground")
            yield tab
            tab.evaluate("sessionStorage.clear()")
    finally:
        tab.unroute_all()
        tab.context.set_offline(False)
