"""Optional packages are imported only if settings need them. A missing package is reported with a remedy."""

import subprocess
import sys

import pytest

from config import checks
from tests.stack.process import ROOT

# redis-py itself imports the metrics of the OpenTelemetry SDK if they are installed.
LOADED = """
import sys
import django
django.setup()
import config.urls, config.celery, config.asgi, runs.engine.engine, runs.engine.loop, webhooks.dispatcher
config.celery.app.loader.import_default_modules()
optional = ("sentry_sdk", "opentelemetry.sdk.trace", "opentelemetry.exporter")
print([name for name in sys.modules if name.startswith(optional)])
"""


@pytest.mark.slow
def test_optional_packages_are_not_imported_without_their_settings():
    answer = subprocess.run(
        [sys.executable, "-c", LOADED],
        cwd=ROOT,
        env={"DJANGO_SETTINGS_MODULE": "config.settings", "VAR_DIR": str(ROOT / "var/check"), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["SENTRY_DSN", "OTEL_EXPORTER_OTLP_ENDPOINT"])
def test_a_missing_package_is_reported_with_a_remedy(settings, monkeypatch, name):
    setattr(settings, name, "http://key@127.0.0.1:1/1")
    assert checks.check_environment() == []
    monkeypatch.setattr(checks, "find_spec", lambda package: None)
    (found,) = checks.check_environment()
    assert name in found.msg
    assert "requirements-observability.txt" in found.hint
