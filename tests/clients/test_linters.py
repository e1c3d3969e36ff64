"""Linters of OpenAPI documents find nothing to report."""

import json

import pytest

from tests.clients.conftest import NpmFolder
from tests.stack.process import ROOT

pytestmark = [pytest.mark.services, pytest.mark.timeout(600)]

DOCUMENT = str(ROOT / "docs" / "openapi.json")


def test_redocly(npm: NpmFolder) -> None:
    quiet = {"REDOCLY_TELEMETRY": "off", "REDOCLY_SUPPRESS_UPDATE_NOTICE": "true"}
    npm.run("redocly", "lint", "--extends=recommended-strict", DOCUMENT, **quiet)


def test_spectral(npm: NpmFolder) -> None:
    # This rule knows the scopes of OAuth only. OpenAPI 3.1 allows them for every scheme.
    rules = {"extends": "spectral:oas", "rules": {"oas3-operation-security-defined": "off"}}
    (npm.path / "rules.yaml").write_text(json.dumps(rules))
    npm.run("spectral", "lint", "--ruleset", "rules.yaml", "--fail-severity", "warn", DOCUMENT)
