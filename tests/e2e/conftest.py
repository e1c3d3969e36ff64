"""A service whose playground is open to everyone, for all tests of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from tests.playground import WIDE
from tests.stack.browser import browsing
from tests.stack.plugin import given_services
from tests.stack.stack import Stack

AGENTS = """
agents:
  - {name: support, displayName: Support, instructions: Help., tools: [calculate, ask_user]}
  - {name: writer, displayName: Writer, instructions: Write., model: demo, tools: []}
"""


@pytest.fixture(scope="package")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    environment = {"PLAYGROUND": "1", "PLAYGROUND_STAFF_ONLY": "0"}
    with Stack(**given_services(), environment=environment) as running:
        file: Path = tmp_path_factory.mktemp("catalogue") / "agents.yaml"
        file.write_text(AGENTS)
        running.manage("catalogue", "apply", str(file))
        file.write_text(AGENTS.replace("Help.", "Help well."))
        running.manage("catalogue", "apply", str(file))
        running.token("ada")
        running.manage("grant_credits", "ada", "10000", "--reason", "tests")
        yield running


@pytest.fixture
def page(browser: Browser, service: Stack) -> Iterator[Page]:
    # Leaving a page ends its requests.
    with browsing(browser, service.url, "/playground", viewport=WIDE) as page:
        yield page
