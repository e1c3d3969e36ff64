"""System checks of the settings. Each message names the variable, and each hint says how to correct it."""

import base64
import re
import sys
from collections.abc import Collection, Iterator
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from django.conf import settings
from django.core.checks import CheckMessage, Error, Tags, Warning, register

from config.kernel import money

# An origin as browsers send it: no path, user or upper case.
ORIGIN = re.compile(r"https?://([a-z0-9.-]+|\[[0-9a-f:]+\])(:[0-9]{1,5})?")
# Each threshold has a bit in the marks of an account (credits/ledger.py).
LOW_THRESHOLDS_MAX = 10
ADDRESSES = (
    *("SESSION_JWKS_URL", "TOP_UP_URL", "OPENAI_BASE_URL", "ANTHROPIC_BASE_URL", "STORAGE_S3_ENDPOINT"),
    "OTEL_EXPORTER_OTLP_ENDPOINT",
)


@register(Tags.security)
def check_environment(app_configs: Any = None, **kwargs: Any) -> list[CheckMessage]:
    """Environment variables with invalid values, and combinations of settings that cannot work."""
    invalid = [(1, f"{name} has an invalid value.", f"{name}: {remedy}.") for name, remedy in settings.ENV.problems]
    return [Error(message, hint=hint, id=f"api.E{number:03d}") for number, message, hint in [*invalid, *_wrong()]]


def _wrong() -> Iterator[tuple[int, str, str]]:
    """The number of a check, its message and its hint."""
    for name in ("SESSION_AUDIENCE", "SESSION_JWKS_URL"):
        if settings.SESSION_ISSUER and not getattr(settings, name):
            yield 2, f"SESSION_ISSUER is set, but {name} is not.", f"Set {name} as your identity provider says."
        elif getattr(settings, name) and not settings.SESSION_ISSUER:
            yield 3, f"{name} is set, but SESSION_ISSUER is not.", f"Set SESSION_ISSUER, or remove {name}."
    for name in ADDRESSES:
        if getattr(settings, name) and not is_http_url(getattr(settings, name)):
            yield 4, f"{name} is not an http(s) address.", f"Set {name} to https://…, or remove it."
    for place, key in enumerate(settings.ENCRYPTION_KEYS, 1):
        if not is_fernet_key(key):
            make = 'python -c "from cryptography.fernet import Fernet; print(Fernet.generate_key().decode())"'
            yield 5, f"ENCRYPTION_KEYS: key {place} is not a Fernet key.", f"Create one: {make}"
    if settings.REDIS_URL and not is_redis_url(settings.REDIS_URL):
        yield 6, "REDIS_URL is not a Redis address.", "Set REDIS_URL to redis://host:6379/0 or rediss://…"
    if not is_http_url(settings.BASE_URL) or any(sign in settings.BASE_URL for sign in "?#@ "):
        yield 7, "BASE_URL is not an http(s) address.", "Set BASE_URL, for example to https://api.example.com"
    for name in ("SIGNUP_CREDITS", "CREDIT_APPROVAL_THRESHOLD"):
        try:
            money.parse(getattr(settings, name), minimum=0)
        except ValueError:
            yield 8, f"{name} is not an amount of credits.", f"Set {name} to a number of at least 0, for example 12.5"
    try:
        if len(money.parse_list(settings.CREDITS_LOW_THRESHOLDS)) > LOW_THRESHOLDS_MAX:
            raise ValueError
    except ValueError:
        hint = f"Set CREDITS_LOW_THRESHOLDS to at most {LOW_THRESHOLDS_MAX} numbers, for example 20,5"
        yield 8, "CREDITS_LOW_THRESHOLDS is not a list of amounts of credits.", hint
    for name in ("CORS_ALLOWED_ORIGINS", "MCP_ALLOWED_ORIGINS"):
        for origin in getattr(settings, name):
            if not ORIGIN.fullmatch(origin):
                hint = "Name each origin, such as https://app.example.com:8443: in lower case, without * and a path."
                yield 14, f"{name}: {origin[:100]} is not the origin of a web app.", hint
    for name, package in (("OTEL_EXPORTER_OTLP_ENDPOINT", "opentelemetry.exporter"), ("SENTRY_DSN", "sentry_sdk")):
        if getattr(settings, name) and not is_installed(package):
            hint = f"Install the packages (pip install -r requirements-observability.txt), or remove {name}."
            yield 10, f"{name} is set, but its packages are not installed.", hint
    if settings.SENTRY_DSN and not is_dsn(settings.SENTRY_DSN):
        yield 4, "SENTRY_DSN is not a DSN.", "Set SENTRY_DSN to https://KEY@HOST/PROJECT, or remove it."
    if settings.TRACE_URL and not (is_http_url(settings.TRACE_URL) and "{trace}" in settings.TRACE_URL):
        hint = "Set TRACE_URL to an address like https://traces.example.com/trace/{trace}, or remove it."
        yield 15, "TRACE_URL is not an http(s) address with {trace}.", hint
    if settings.DATABASE_URL and settings.DATABASE_LOCK_SECONDS >= settings.DATABASE_ANSWER_SECONDS:
        least = f"more than {settings.DATABASE_LOCK_SECONDS:g}, the time limit for a lock"
        yield 12, f"DATABASE_ANSWER_SECONDS is not {least}.", f"Set DATABASE_ANSWER_SECONDS to {least}."


def require_valid_settings(**kwargs: Any) -> None:
    """End the process and name all invalid variables. Not with another exception, which Celery would only log."""
    if errors := [*check_environment(), *shared_secrets()]:
        sys.exit("\n".join(f"{error.msg} {error.hint}" for error in errors))


def is_installed(package: str) -> bool:
    """Whether the package can be imported."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # its parent package is not installed
        return False


@register(Tags.security, deploy=True)
def shared_secrets(app_configs: Any = None, **kwargs: Any) -> list[CheckMessage]:
    """Processes that share a database may run on different machines, so none of them generates a key of its own."""
    if not settings.DATABASE_URL or settings.ENV.text("SECRET_KEY"):
        return []
    hint = "Set SECRET_KEY to the same 50 random characters in every process."
    return [Error("DATABASE_URL is set, but SECRET_KEY is not.", hint=hint, id="api.E013")]


@register(Tags.security, deploy=True)
def check_production(app_configs: Any = None, **kwargs: Any) -> list[CheckMessage]:
    """Settings that are safe for local use only."""
    from django.http.request import split_domain_port, validate_host  # not needed in a process

    host = split_domain_port(settings.BASE_URL.partition("://")[2].partition("/")[0])[0]
    is_allowed = validate_host(host, settings.ALLOWED_HOSTS)
    endless = settings.SECURE_SSL_REDIRECT and not settings.SECURE_PROXY_SSL_HEADER
    shared = settings.SECURE_PROXY_SSL_HEADER and not settings.TRUSTED_PROXIES
    same, example, env = "in every process.", "agents.example.com" in settings.BASE_URL, settings.ENV
    unsafe = [
        (1, {"*", "."} & {*settings.ALLOWED_HOSTS}, "ALLOWED_HOSTS allows every host.", "Name the service's hosts."),
        (2, not env.text("SECRET_KEY"), "SECRET_KEY is not set.", f"Set the same 50 random characters {same}"),
        (3, not env.items("ENCRYPTION_KEYS"), "ENCRYPTION_KEYS is not set.", f"Set the same keys {same}"),
        (4, settings.DEBUG, "DEBUG is on.", "Remove DEBUG."),
        (5, not settings.BASE_URL.startswith("https://"), "BASE_URL is not https.", "Set the public https address."),
        (13, example, "BASE_URL is the example of .env.example.", "Set your own address."),
        (6, not env.text("METRICS_TOKEN"), "METRICS_TOKEN is not set.", "Set random characters, as in Prometheus."),
        (7, settings.OUTBOUND_ALLOW_PRIVATE, "OUTBOUND_ALLOW_PRIVATE: webhooks and tools reach private addresses.", ""),
        (9, not settings.PLAYGROUND_STAFF_ONLY, "PLAYGROUND_STAFF_ONLY is off.", "Remove PLAYGROUND_STAFF_ONLY."),
        (10, settings.SESSION_JWKS_URL.startswith("http:"), "SESSION_JWKS_URL is not https.", "Set it to https://…"),
        (11, not settings.SESSION_ISSUER, "The service issues its own session tokens.", "Set SESSION_ISSUER."),
        (12, not settings.REDIS_URL, "REDIS_URL is not set.", "Set the Redis server that all processes share."),
        (14, not settings.DATABASE_URL, "DATABASE_URL is not set.", "Set the PostgreSQL that all processes share."),
        (15, not is_allowed, f"ALLOWED_HOSTS is without {host}.", "Add the host of BASE_URL."),
        (16, endless, "TRUST_FORWARDED_PROTO is off: https is redirected too.", "Set it."),
        (17, shared, "TRUSTED_PROXIES is 0: all clients have the proxy's address.", "Set the number of proxies."),
    ]
    return [Warning(message, hint=hint, id=f"api.W{number:03d}") for number, found, message, hint in unsafe if found]


def is_http_url(text: str) -> bool:
    return is_url(text, {"http", "https"}) and bool(urlsplit(text).hostname)


def is_redis_url(text: str) -> bool:
    """Celery accepts only numbers of databases."""
    is_redis = is_url(text, {"redis", "rediss", "unix"})
    return is_redis and (text.startswith("unix") or bool(re.fullmatch("/?[0-9]*", urlsplit(text).path)))


def is_url(text: str, schemes: Collection[str]) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in schemes and parts.port != 0
    except ValueError:  # also for a port that is not a number up to 65535
        return False


def is_dsn(text: str) -> bool:
    """Whether Sentry's SDK accepts the DSN."""
    parts = urlsplit(text) if is_http_url(text) else None
    return parts is not None and bool(parts.username) and parts.path.rpartition("/")[2].isdecimal()


def is_fernet_key(text: str) -> bool:
    """Checked without importing Fernet, which takes 7 MiB of each process."""
    try:
        return len(base64.urlsafe_b64decode(text)) == 32
    except ValueError:
        return False
