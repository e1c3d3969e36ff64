"""A linter of OpenAPI documents finds nothing to report."""

import pytest

from tests.clients.conftest import NpmFolder
from tests.stack.process import ROOT

pytestmark = [pytest.mark.services, pytest.mark.timeout(600)]

DOCUMENT = str(ROOT / "docs" / "openapi.json")


def test_redocly(npm: NpmFolder) -> None:
    quiet = {"REDOCLY_TELEMETRY": "off", "REDOCLY_SUPPRESS_UPDATE_NOTICE": "true"}
    npm.run("redocly", "lint", "--extends=recommended-strict", DOCUMENT, **quiet)
