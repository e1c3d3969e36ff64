"""System checks. What depends on the environment of a process is checked in a separate process."""

import os
import re
from pathlib import Path

import pytest
from cryptography.fernet import Fernet
from django.core.checks import run_checks
from django.test import override_settings

from config.checks import check_environment
from config.env import Env
from runs.models import AgentModel, Provider
from tests.stack.process import python, run

# Most tests start a process.
pytestmark = pytest.mark.slow

PRODUCTION = {
    "SECRET_KEY": "k" * 20 + "0123456789abcdefghijklmnopqrstuvwxyzABCDEF",
    "ENCRYPTION_KEYS": f"{Fernet.generate_key().decode()},{Fernet.generate_key().decode()}",
    "DATABASE_URL": "postgres://service:secret@db.example.com:5432/service",
    "REDIS_URL": "rediss://broker.example.com:6379/0",
    "BASE_URL": "https://api.example.com",
    "ALLOWED_HOSTS": "api.example.com",
    "TRUST_FORWARDED_PROTO": "1",
    "TRUSTED_PROXIES": "1",
    "METRICS_TOKEN": "0123456789abcdef",
    "SESSION_ISSUER": "https://id.example.com/",
    "SESSION_AUDIENCE": "agents",
    "SESSION_JWKS_URL": "https://id.example.com/jwks",
}


def check(tmp_path: Path, environment: dict[str, str], *args: str) -> str:
    """Return the output of ``manage.py check --deploy``."""
    kept = {
        name: os.environ[name]
        for name in ("PATH", "HOME", "PYTHONPATH", "DJANGO_SETTINGS_MODULE")
        if name in os.environ
    }
    command = python("manage.py", "check", "--deploy", "--tag", "security", "--tag", "models", *args)
    answer = run(command, kept | {"VAR_DIR": str(tmp_path)} | environment)
    assert "Traceback" not in answer.stderr, answer.stderr
    return answer.stdout + answer.stderr


def test_valid_production_settings_give_no_warning(tmp_path):
    assert check(tmp_path, PRODUCTION, "--fail-level", "WARNING").strip() == (
        "System check identified no issues (0 silenced)."
    )


@pytest.mark.parametrize(
    ("wrong", "numbers"),
    [
        (
            {
                "OUTBOUND_ALLOW_PRIVATE": "1",
                "PLAYGROUND_STAFF_ONLY": "0",
                "SESSION_JWKS_URL": "http://id.example.com/jwks",
                "REDIS_URL": "",
                "DATABASE_URL": "",
                "TRUSTED_PROXIES": "0",
            },
            (7, 9, 10, 12, 14, 17),
        ),
        ({"BASE_URL": "https://agents.example.com", "TRUST_FORWARDED_PROTO": "0"}, (13, 15, 16)),
        ({"ALLOWED_HOSTS": "other.example.com"}, (15,)),
        ({"ALLOWED_HOSTS": "https://api.example.com"}, (15,)),
    ],
)
def test_a_setting_for_local_use_is_a_warning(tmp_path, wrong, numbers):
    printed = check(tmp_path, PRODUCTION | wrong)
    assert "WARNINGS" in printed
    assert set(re.findall(r"api\.W0*(\d+)", printed)) == {str(number) for number in numbers}, printed
    assert [name for name in wrong if name not in printed] == []


@pytest.mark.parametrize("names", [[], ["gpt"], ["demo", "gpt"], ["gpt", "demo"], ["demo"]])
@pytest.mark.django_db
def test_a_catalogue_whose_only_or_default_model_is_demo_is_a_warning(names):
    """The first name is the default."""
    AgentModel.objects.all().delete()
    for name in names:
        kind = Provider.objects.get(name="demo" if name == "demo" else "openai")
        AgentModel.objects.create(name=name, provider=kind, price_in=0, price_out=0, is_default=name == names[0])
    openai = Provider.objects.get(name="openai")
    AgentModel.objects.create(name="off", provider=openai, price_in=0, price_out=0, enabled=False)
    expected = [] if names[:1] == ["gpt"] else ["runs.W001"]
    assert [warning.id for warning in run_checks(tags=["catalogue"], include_deployment_checks=True)] == expected
    assert run_checks(tags=["catalogue"]) == []


@pytest.mark.parametrize("url", ["postgres://service:secret@127.0.0.1:1/service", "nonsense", ""])
def test_the_catalogue_is_not_checked_without_a_database(tmp_path, url):
    assert "runs.W001" not in check(tmp_path, PRODUCTION | {"DATABASE_URL": url}, "--tag", "catalogue")


@pytest.mark.parametrize(
    "origin",
    [
        *(
            "*",
            "https://*.example.com",
            "null",
            "app.example.com",
            "https://app.example.com/",
            "https://me@example.com",
        ),
        *("https://App.example.com", "ftp://a", "https://", "https://é"),
    ],
)
def test_what_is_no_origin_is_refused(origin):
    with override_settings(CORS_ALLOWED_ORIGINS=["https://app.example.com", origin]):
        (error,) = [found for found in check_environment() if found.id == "api.E014"]
    assert "CORS_ALLOWED_ORIGINS" in error.msg
    assert "https://app.example.com" in error.hint


def test_exact_origins_are_accepted():
    origins = ["https://app.example.com", "http://localhost:3000", "https://[::1]:8443", "http://10.0.0.1:443"]
    with override_settings(CORS_ALLOWED_ORIGINS=origins):
        assert [found for found in check_environment() if found.id == "api.E014"] == []


def test_no_server_starts_with_any_origin(tmp_path):
    printed = check(tmp_path, PRODUCTION | {"CORS_ALLOWED_ORIGINS": "*"})
    assert "Name each origin" in printed


def test_a_local_issuer_is_a_warning(tmp_path):
    local = dict.fromkeys(("SESSION_ISSUER", "SESSION_AUDIENCE", "SESSION_JWKS_URL"), "")
    assert "SESSION_ISSUER" in check(tmp_path, PRODUCTION | local)


def test_no_server_starts_on_a_shared_database_without_its_key(tmp_path):
    environment = PRODUCTION | {"SECRET_KEY": "", "VAR_DIR": str(tmp_path), "PATH": os.environ["PATH"]}
    environment["DJANGO_SETTINGS_MODULE"] = "config.settings"
    start = "from config import checks; checks.require_valid_settings()"  # as each server begins
    for given, expected in ((environment, 1), (environment | {"SECRET_KEY": PRODUCTION["SECRET_KEY"]}, 0)):
        server = run(python("-c", start), given)
        assert server.returncode == expected, server.stderr
        assert ("SECRET_KEY is not" in server.stderr) == bool(expected)


def test_an_https_address_makes_cookies_and_redirects_secure(tmp_path):
    names = ("SESSION_COOKIE_SECURE", "CSRF_COOKIE_SECURE", "SECURE_SSL_REDIRECT", "SECURE_HSTS_SECONDS")
    program = f"from config import settings; print([bool(getattr(settings, name)) for name in {names}])"
    for url, secure in (("https://api.example.com", True), ("http://127.0.0.1:8000", False)):
        environment = PRODUCTION | {"BASE_URL": url, "VAR_DIR": str(tmp_path), "PATH": os.environ["PATH"]}
        assert run(python("-c", program), environment).stdout.strip() == str([secure] * 4)


def test_all_wrong_settings_are_reported_together_with_remedies(tmp_path):
    wrong = {
        "PORT": "many",
        "DEBUG": "perhaps",
        "RATE_LIMIT_PUBLIC": "-1",
        "LOG_LEVEL": "loud",
        "SIGNUP_CREDITS": "lots",
        "CREDIT_APPROVAL_THRESHOLD": "-1",
        "ENCRYPTION_KEYS": "a-secret-that-is-none",
        "REDIS_URL": "http://broker.example.com",
        "BASE_URL": "api.example.com",
        "TRACE_URL": "javascript:{trace}",
        "SESSION_AUDIENCE": "",
        "SESSION_JWKS_URL": "",
        "DATABASE_ANSWER_SECONDS": "3",
        "RUN_TIMEOUT_SECONDS": "nan",
        "RUN_QUEUE_MAX": "1001",
        "TOP_UP_URL": "app.example.com",
        "MCP_ALLOWED_ORIGINS": "https://app.example.com/",
        "OPENAI_BASE_URL": "api.example.com/v1",
        "ANTHROPIC_BASE_URL": "ftp://api.example.com",
        "STORAGE_S3_ENDPOINT": "minio:9000",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4318",
        "SENTRY_DSN": "https://sentry.example.com/1",
    }
    printed = check(tmp_path, PRODUCTION | wrong)
    for name in wrong:
        assert name in printed, name
    assert "use 1 or 0" in printed
    assert "use a whole number from 1 to 65535" in printed
    assert "a-secret-that-is-none" not in printed


def test_a_state_directory_that_cannot_be_made_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    printed = check(tmp_path, {"VAR_DIR": str(tmp_path / "file" / "var")})
    assert "VAR_DIR" in printed


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("REDIS_URL", "redis://host:port/0"),
        ("REDIS_URL", "redis://host:99999/0"),
        ("REDIS_URL", "redis://[host"),
        ("REDIS_URL", "redis://host:6379/name"),
        ("BASE_URL", "https://host:99999"),
        ("BASE_URL", "https://me@example.com"),
        ("BASE_URL", "https://example.com?a=b"),
    ],
)
def test_an_address_that_cannot_be_used_is_reported(name, value):
    with override_settings(**{name: value}):
        (error,) = check_environment()
    assert error.msg.startswith(f"{name} is not")


@pytest.mark.parametrize("url", ["mysql://u:p@host/name", "nonsense", "postgres://host:port/name"])
def test_an_unsupported_database_is_reported(monkeypatch, url):
    """``deployed/test_first_steps.py`` shows that each process names it."""
    monkeypatch.setenv("DATABASE_URL", url)
    env = Env()
    env.postgres("DATABASE_URL", {})
    assert env.problems == [("DATABASE_URL", "use postgres://user:password@host:port/name")]


def test_a_key_address_without_an_issuer_is_reported(tmp_path):
    printed = check(tmp_path, PRODUCTION | {"SESSION_ISSUER": ""})
    assert "Set SESSION_ISSUER" in printed


def test_local_settings_are_reported_for_production(tmp_path):
    printed = check(tmp_path, {"ALLOWED_HOSTS": "*", "DEBUG": "1"})
    for number in range(1, 7):
        assert f"api.W{number:03d}" in printed


def test_local_settings_are_valid_for_local_use():
    assert check_environment() == []


@pytest.mark.parametrize("name", ["SIGNUP_CREDITS", "CREDIT_APPROVAL_THRESHOLD"])
@pytest.mark.parametrize("text", ["", "-1", "NaN", "Infinity", "1e10", "0.0000001", "ten", "1,5"])
def test_what_is_no_amount_of_credits_is_refused(name, text):
    for given in ("0", "100", "12.5", "0.000001", "1000000000", text):
        with override_settings(**{name: given}):
            assert [found.id for found in check_environment()] == (["api.E008"] if given == text else [])
