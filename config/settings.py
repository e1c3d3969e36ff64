"""All settings, and so all differences between local use and production. Most are read from environment variables.

The `#:` comment above a variable is its description in docs/settings.md, which `make docs` generates. Links in it are
relative to docs/.
"""

import hashlib
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

from config.components import *  # noqa: F403
from config.env import Env
from config.local.secrets import fernet_key, secret_from_file, signing_key

BASE_DIR = Path(__file__).resolve().parent.parent
ENV = Env()

# --- state -----------------------------------------------------------------------------------------------------------
#: directory of the embedded default's state: database, broker, files, generated secrets (default: `var`)
VAR_DIR = Path(ENV.text("VAR_DIR", str(BASE_DIR / "var"))).absolute()
#: `postgres://user:password@host:port/name`; if empty, SQLite under `VAR_DIR`
DATABASE_URL = ENV.text("DATABASE_URL")
#: `redis://…` or `rediss://…`; if empty, the embedded broker
REDIS_URL = ENV.text("REDIS_URL")
EMBEDDED = not DATABASE_URL and not REDIS_URL

# --- core ------------------------------------------------------------------------------------------------------------
#: Django's debug mode; never use it in production
DEBUG = ENV.flag("DEBUG", False)
#: signs admin sessions and upload URLs. With SQLite and `make run` it is generated under `VAR_DIR`; otherwise the
#: processes do not start without it
SECRET_KEY = ENV.text("SECRET_KEY") or secret_from_file(VAR_DIR / "secret_key")
#: earlier values that are still accepted
SECRET_KEY_FALLBACKS = ENV.items("SECRET_KEY_FALLBACKS")
#: port of the web process
PORT = ENV.whole("PORT", 8000, 1, 65535)
#: the service's own address, used in links to files. If it starts with `https://`, cookies are secure and http is
#: redirected (default: `http://127.0.0.1:$PORT`)
BASE_URL = ENV.text("BASE_URL", f"http://127.0.0.1:{PORT}").rstrip("/")
#: host names that the service accepts
ALLOWED_HOSTS = ENV.items("ALLOWED_HOSTS", ("127.0.0.1", "localhost", "[::1]"))
ROOT_URLCONF = "config.urls"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
APPEND_SLASH = False
TIME_ZONE = "UTC"
USE_I18N = False
FORMAT_MODULE_PATH = "config.formats"

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "config" / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]

# --- database --------------------------------------------------------------------------------------------------------
# Time limit for a statement that waits for a lock; must be less than `DATABASE_ANSWER_SECONDS`.
DATABASE_LOCK_SECONDS = 5
#: time limit for the answer to a statement. Then the request is answered with 503, or the worker repeats the step on a
#: new connection. It does not apply to `manage.py`
DATABASE_ANSWER_SECONDS = ENV.number("DATABASE_ANSWER_SECONDS", 20, 1, 3600)
# A command, for example a migration or a check of all rows, may take as long as it needs.
DATABASE_LIMITS_APPLY = Path(sys.argv[0]).name != "manage.py"
# PgBouncer in transaction mode does not keep a server-side cursor between statements.
#: set to 1 behind PgBouncer in transaction mode
_pgbouncer = ENV.flag("DATABASE_PGBOUNCER", False)
# Seconds that a connection is kept, that opening one may take, and until one whose host acknowledges nothing is closed.
DATABASE_CONN_MAX_AGE = 600
DATABASE_CONNECT_SECONDS = 5
DATABASE_TCP_SECONDS = 15
_options: dict[str, Any] = {
    "connect_timeout": DATABASE_CONNECT_SECONDS,
    "tcp_user_timeout": round(DATABASE_TCP_SECONDS * 1000),
    # A connection without traffic asks the host whether it is there, and is closed after questions without an answer.
    "keepalives": 1,
    "keepalives_idle": 15,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    # From its fifth execution on a connection, a statement is prepared: PostgreSQL plans it only once. This does not
    # work with PgBouncer, where each statement may reach another server process.
    "server_side_binding": True,
    "prepare_threshold": None if _pgbouncer else 5,
}
# PostgreSQL ends a transaction that is idle so long: that of a suspended process would keep its locks for hours.
# PgBouncer does not forward the options: there, set them for the role.
DATABASE_IDLE_TRANSACTION_SECONDS = 10
_limits: dict[str, float] = {"idle_in_transaction_session_timeout": DATABASE_IDLE_TRANSACTION_SECONDS}
if DATABASE_LIMITS_APPLY:
    # When the client stops waiting, the server stops working on the statement.
    _limits |= {"lock_timeout": DATABASE_LOCK_SECONDS, "statement_timeout": DATABASE_ANSWER_SECONDS}
if not _pgbouncer:
    _options["options"] = " ".join(f"-c {name}={round(seconds * 1000)}" for name, seconds in _limits.items())
_kept = {"CONN_MAX_AGE": DATABASE_CONN_MAX_AGE, "CONN_HEALTH_CHECKS": True, "DISABLE_SERVER_SIDE_CURSORS": _pgbouncer}
_sqlite = {
    "ENGINE": "django.db.backends.sqlite3",
    "NAME": VAR_DIR / "db.sqlite3",
    "CONN_MAX_AGE": None,
    # A deferred transaction that begins to write after another transaction has written fails at once with "database is
    # locked"; SQLite's time-out does not apply. An IMMEDIATE transaction waits at its start.
    "OPTIONS": {
        "transaction_mode": "IMMEDIATE",
        "timeout": 20,
        "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
    },
    "TEST": {"NAME": VAR_DIR / "test.sqlite3"},
}
DATABASES = {"default": _kept | ENV.postgres("DATABASE_URL", _options) if DATABASE_URL else _sqlite}

# --- broker ----------------------------------------------------------------------------------------------------------
# The path of a Unix socket has at most about 100 characters; instead of a longer one, the temporary directory is used.
BROKER_SOCKET = VAR_DIR / "broker.sock"
if len(str(BROKER_SOCKET)) > 90:
    BROKER_SOCKET = Path(tempfile.gettempdir()) / f"aws-{hashlib.sha256(str(VAR_DIR).encode()).hexdigest()[:16]}.sock"
CACHE_REDIS_URL = REDIS_URL or f"unix://{BROKER_SOCKET}"
# Time limit for a connection to Redis and for its answers.
BROKER_TIMEOUT_SECONDS = 2.0

# --- web server (config/serve) ---------------------------------------------------------------------------------------
#: processes of the web server
WEB_WORKERS = ENV.whole("WEB_WORKERS", 2, 1, 256)
#: threads per process: requests that are worked on at the same time
WEB_THREADS = ENV.whole("WEB_THREADS", 16, 1, 1024)
#: time for requests to finish after SIGTERM
WEB_GRACEFUL_SECONDS = ENV.whole("WEB_GRACEFUL_SECONDS", 25, 1, 1800)

# --- API -------------------------------------------------------------------------------------------------------------
# Larger JSON bodies are answered with 413.
API_MAX_BODY_BYTES = 1024 * 1024
DATA_UPLOAD_MAX_MEMORY_SIZE = API_MAX_BODY_BYTES
# The same for the protocols of chat front ends, whose clients send their whole history each time.
UI_MAX_BODY_BYTES = 4 * 1024 * 1024
UI_PROTOCOLS = "ai-sdk", "ag-ui", "copilotkit"
#: requests per minute and user on the session surface; 0 means no limit
RATE_LIMIT_SESSION = ENV.whole("RATE_LIMIT_SESSION", 600)
#: requests per minute and user on the public surface
RATE_LIMIT_PUBLIC = ENV.whole("RATE_LIMIT_PUBLIC", 300)
#: run starts per minute and user
RATE_LIMIT_RUN_STARTS = ENV.whole("RATE_LIMIT_RUN_STARTS", 60)
#: requests without a valid credential per minute and address
RATE_LIMIT_UNAUTHENTICATED = ENV.whole("RATE_LIMIT_UNAUTHENTICATED", 300)
#: requests for pages (admin, playground) per minute and address
RATE_LIMIT_PAGES = ENV.whole("RATE_LIMIT_PAGES", 300)
#: number of proxies in front that append to `X-Forwarded-For`
TRUSTED_PROXIES = ENV.whole("TRUSTED_PROXIES", 0, 0, 10)
#: origins of web apps that may call the API from a browser, for example `https://app.example.com`
#: ([browser apps](api.md#browser-apps))
CORS_ALLOWED_ORIGINS = ENV.items("CORS_ALLOWED_ORIGINS")

# --- session tokens --------------------------------------------------------------------------------------------------
#: the OIDC provider's issuer; if empty, the service issues its own tokens
SESSION_ISSUER = ENV.text("SESSION_ISSUER")
#: the expected `aud`
SESSION_AUDIENCE = ENV.text("SESSION_AUDIENCE")
#: address of the provider's keys
SESSION_JWKS_URL = ENV.text("SESSION_JWKS_URL")
SESSION_LEEWAY_SECONDS = 30
# Signs the session tokens of the local issuer.
SESSION_KEY = "" if SESSION_ISSUER else secret_from_file(VAR_DIR / "session_key.pem", signing_key)

# --- credits ---------------------------------------------------------------------------------------------------------
#: credits granted to each new user
SIGNUP_CREDITS = ENV.text("SIGNUP_CREDITS", "100")
#: balances of which the installation endpoint is told when a user's goes below, separated by commas
CREDITS_LOW_THRESHOLDS = ENV.text("CREDITS_LOW_THRESHOLDS", "20,5")
#: the page of your app where a user buys credits, such as `https://app.example.com/buy?user={userId}`; empty: none
TOP_UP_URL = ENV.text("TOP_UP_URL")
# (user id, chat ids) → {chat id: title}, for the reports of credits, which may not import chats.
CREDITS_CHAT_TITLES = "chats.services.titles_of"
# (names of tools) → {name: its display name}, for those reports.
CREDITS_TOOL_NAMES = "runs.catalogue.display_names"
# (ids of tool calls) → {id: when the user approved it}, for the ledger in the admin.
CREDITS_APPROVALS = "runs.admin.runs.approved_at"
CREDIT_EXPIRY_SWEEP_SECONDS = 60

# --- attachments -----------------------------------------------------------------------------------------------------
# Media types; "text/*" means all types of text.
#: content types that may be uploaded
ATTACHMENT_TYPES = ENV.items(
    "ATTACHMENT_TYPES",
    ("text/*", "application/json", "application/pdf", "image/png", "image/jpeg", "image/gif", "image/webp"),
)
#: size limit of one attachment
ATTACHMENT_MAX_BYTES = ENV.whole("ATTACHMENT_MAX_BYTES", 20 * 1024 * 1024, 1)
#: size limit of all attachments of one user that are not purged; 0 means no limit
ATTACHMENT_USER_MAX_BYTES = ENV.whole("ATTACHMENT_USER_MAX_BYTES", 1024**3)
#: time after which a deleted chat is purged with its messages, files and runs; the ledger stays
CHAT_RETENTION_DAYS = ENV.whole("CHAT_RETENTION_DAYS", 30, 0, 36500)
#: time after which an attachment that no message uses is removed
ATTACHMENT_UNUSED_DAYS = ENV.whole("ATTACHMENT_UNUSED_DAYS", 30, 1, 36500)

# --- runs ------------------------------------------------------------------------------------------------------------
#: default `creditApprovalThreshold` of runs
CREDIT_APPROVAL_THRESHOLD = ENV.text("CREDIT_APPROVAL_THRESHOLD", "10")
#: running runs per user; more runs are queued in order; 0 means no limit
RUN_USER_LIMIT = ENV.whole("RUN_USER_LIMIT", 20)
#: the model that summarises the earlier runs of a chat that outgrows its model; if empty or if it fails, the run's own
RUN_SUMMARY_MODEL = ENV.text("RUN_SUMMARY_MODEL")
#: runs that are queued behind the active run of a chat; one statement ends them all
RUN_QUEUE_MAX = ENV.whole("RUN_QUEUE_MAX", 100, 1, 1000)
#: turns per run
RUN_TURN_LIMIT = ENV.whole("RUN_TURN_LIMIT", 50, 1)
#: running time per run
RUN_TIMEOUT_SECONDS = ENV.number("RUN_TIMEOUT_SECONDS", 1800, 1)
#: how long a run waits for an answer
WAITPOINT_EXPIRY_SECONDS = ENV.number("WAITPOINT_EXPIRY_SECONDS", 24 * 3600, 1)
#: how long a run waits for credits, with `onCreditsExhausted: wait`
CREDITS_WAIT_SECONDS = ENV.number("CREDITS_WAIT_SECONDS", 7 * 24 * 3600, 1)

# --- tools -----------------------------------------------------------------------------------------------------------
#: time limit of a tool call, if the tool has none of its own
TOOL_TIMEOUT_SECONDS = ENV.number("TOOL_TIMEOUT_SECONDS", 60, 0.1, 3600)
# Time limit of what staff wait for: *Test* of a model, *Try it* of a tool, the list of tools for an import.
STAFF_REQUEST_SECONDS = 20
#: size limit of the answer of an `http` tool and of a fetched page
TOOL_ANSWER_MAX_BYTES = ENV.whole("TOOL_ANSWER_MAX_BYTES", 1024 * 1024, 1024)
#: tool calls of one user at work in a worker process; further ones wait, and the wait costs them none of their time
TOOL_CALLS_PER_USER = ENV.whole("TOOL_CALLS_PER_USER", 32, 1, 100_000)
#: tool calls of one user that [await their outcome](tools.md#calls-that-take-long) without a worker; one more fails
PARKED_CALLS_PER_USER = ENV.whole("PARKED_CALLS_PER_USER", 1000, 1, 1_000_000)
#: how long a call awaits [the caller's app](tools.md#client-tools)
CLIENT_CALL_SECONDS = ENV.number("CLIENT_CALL_SECONDS", 24 * 3600, 1)

# --- requests to models ----------------------------------------------------------------------------------------------
MESSAGE_MAX_CHARS = 100_000
#: `0`: requests with an API key may not have `instructions`, 400
RUN_INSTRUCTIONS_PUBLIC = ENV.flag("RUN_INSTRUCTIONS_PUBLIC", True)
#: time limit of a turn
MODEL_TIMEOUT_SECONDS = ENV.number("MODEL_TIMEOUT_SECONDS", 600, 0.1, 7200)
# Longest time within a turn in which the model sends nothing.
MODEL_STALL_SECONDS = 120
#: how often a turn asks one model, before its fallbacks
MODEL_ATTEMPTS = ENV.whole("MODEL_ATTEMPTS", 5, 1, 100)

# --- run workers -----------------------------------------------------------------------------------------------------
#: time after which other workers take over the runs of a worker that sends no heartbeat
RUN_LEASE_SECONDS = ENV.number("RUN_LEASE_SECONDS", 10, 0.5, 600)
#: runs that one worker process executes at a time
RUN_WORKER_CAPACITY = ENV.whole("RUN_WORKER_CAPACITY", 2000, 1)
#: database threads of a worker process, one connection each (the heartbeat has one more)
RUN_WORKER_DB_THREADS = ENV.whole("RUN_WORKER_DB_THREADS", 8, 1, 64)
#: time for steps to finish after SIGTERM, before the worker hands its runs over
RUN_SHUTDOWN_GRACE_SECONDS = ENV.number("RUN_SHUTDOWN_GRACE_SECONDS", 15, 0, 600)
# Interval at which workers look for runs whose message was lost and for waitpoints after their time; for lost workers
# they look at this interval or in a fifth of `RUN_LEASE_SECONDS`, whichever is shorter.
RUN_SWEEP_SECONDS = 2

# --- streams ---------------------------------------------------------------------------------------------------------
#: open streams per user, in all processes together; one more is 429
STREAMS_PER_USER = ENV.whole("STREAMS_PER_USER", 50, 1, 100_000)
#: open streams per process
STREAM_CONNECTIONS_MAX = ENV.whole("STREAM_CONNECTIONS_MAX", 5000, 1)
# A client that reads nothing of a stream or another answer for this time is disconnected.
STREAM_STALL_SECONDS = 30
#: how long the stream events of finished runs are kept
RUN_EVENT_RETENTION_DAYS = ENV.whole("RUN_EVENT_RETENTION_DAYS", 30, 1)

# --- MCP and playground ----------------------------------------------------------------------------------------------
#: other web origins whose pages may call `/api/mcp`
MCP_ALLOWED_ORIGINS = ENV.items("MCP_ALLOWED_ORIGINS")
#: serve `/playground` (default: on in the embedded default and with `DEBUG`)
PLAYGROUND = ENV.flag("PLAYGROUND", EMBEDDED or DEBUG)
#: show the playground only to staff who are signed in to the admin (default: off in the embedded default and with
#: `DEBUG`, otherwise on)
PLAYGROUND_STAFF_ONLY = ENV.flag("PLAYGROUND_STAFF_ONLY", not (EMBEDDED or DEBUG))

# --- models ----------------------------------------------------------------------------------------------------------
#: key of the provider `openai`, for the address below ([docs/models.md](models.md))
OPENAI_API_KEY = ENV.text("OPENAI_API_KEY")
#: address of that provider, if the admin names none: any OpenAI-compatible one
OPENAI_BASE_URL = ENV.text("OPENAI_BASE_URL", "https://api.openai.com/v1")
#: key of the provider `anthropic`, for the address below
ANTHROPIC_API_KEY = ENV.text("ANTHROPIC_API_KEY")
#: address of that provider, if the admin names none
ANTHROPIC_BASE_URL = ENV.text("ANTHROPIC_BASE_URL", "https://api.anthropic.com")
#: the least output limit with which a turn begins when credits or budget are short
MODEL_MIN_OUTPUT_TOKENS = ENV.whole("MODEL_MIN_OUTPUT_TOKENS", 256, 1)
_catalogue = BASE_DIR / "catalogue.yaml"
#: the [catalogue file](catalogue.md) that a release and `make run` apply; if empty, `catalogue.yaml` in the project's
#: root, if there is one
CATALOGUE_FILE = ENV.text("CATALOGUE_FILE") or (str(_catalogue) if _catalogue.exists() else "")
CATALOGUE_MAX_BYTES = 1024 * 1024
#: the system prompt of every turn
MODEL_SYSTEM_PROMPT = ENV.text("MODEL_SYSTEM_PROMPT", "You are a helpful assistant. Use the tools when they help.")

# --- outbound requests: webhooks and tools ----------------------------------------------------------------------------
#: allow http and private addresses, for webhooks and tools (default: on only in the embedded default)
OUTBOUND_ALLOW_PRIVATE = ENV.flag("OUTBOUND_ALLOW_PRIVATE", EMBEDDED)
OUTBOUND_CONNECT_TIMEOUT_SECONDS = 5

# --- webhooks --------------------------------------------------------------------------------------------------------
#: how long the previous secret stays valid after a rotation
WEBHOOK_GRACE_SECONDS = ENV.whole("WEBHOOK_GRACE_SECONDS", 24 * 3600, 0)
WEBHOOK_ATTEMPT_TIMEOUT_SECONDS = 15
WEBHOOK_SWEEP_SECONDS = 5
#: how long finished deliveries are kept
WEBHOOK_RETENTION_DAYS = ENV.whole("WEBHOOK_RETENTION_DAYS", 30, 1)
#: Fernet keys for stored secrets, newest first; generated under `VAR_DIR` if empty
ENCRYPTION_KEYS = ENV.items("ENCRYPTION_KEYS") or [secret_from_file(VAR_DIR / "encryption_key", fernet_key)]

# --- Celery ----------------------------------------------------------------------------------------------------------
CELERY_BROKER_URL = REDIS_URL or f"redis+socket://{BROKER_SOCKET}"
CELERY_BROKER_TRANSPORT_OPTIONS = {
    # Longer than the countdown of a webhook retry (at most 600 s), so that the broker does not deliver it again
    # meanwhile. It keeps no other fetched messages.
    "visibility_timeout": 3600,
    "socket_timeout": BROKER_TIMEOUT_SECONDS,
    "socket_connect_timeout": BROKER_TIMEOUT_SECONDS,
    "socket_keepalive": True,
    "max_retries": 1,
    "interval_start": 0,
    "interval_max": 0.1,
}
CELERY_BROKER_CONNECTION_TIMEOUT = BROKER_TIMEOUT_SECONDS
CELERY_BEAT_SCHEDULE_FILENAME = str(VAR_DIR / "celerybeat-schedule")
# Each scheduled job: its task, the function that does its work and returns the number of rows, and its interval.
JOBS: dict[str, tuple[str, str, float]] = {
    "sweep-runs": ("runs.sweep", "runs.lifecycle.sweep", RUN_SWEEP_SECONDS),
    "sweep-webhooks": ("webhooks.sweep", "webhooks.tasks.sweep", WEBHOOK_SWEEP_SECONDS),
    "trim-webhooks": ("webhooks.trim", "webhooks.transitions.drop_excess", 60.0),
    "prune-run-events": ("runs.prune_events", "runs.purge.prune_events", 3600.0),
    "measure-typical-credits": ("runs.measure_typical_credits", "runs.catalogue.typical.measure", 3600.0),
    "prune-webhooks": ("webhooks.prune", "webhooks.tasks.prune", 3600.0),
    "prune-idempotency": ("api.prune_idempotency", "config.api.idempotency.prune", 3600.0),
    "prune-sessions": ("api.prune_sessions", "config.tasks.prune_sessions", 3600.0),
    "expire-attachments": ("chats.expire_attachments", "chats.attachments.expire_attachments", 300.0),
    "purge-chats": ("chats.purge", "chats.services.purge_chats", 3600.0),
    "purge-attachments": ("chats.purge_attachments", "chats.attachments.purge_attachments", 3600.0),
    "expire-grants": ("credits.expire_grants", "credits.grants.expire_all", CREDIT_EXPIRY_SWEEP_SECONDS),
    "sweep-low-credits": ("credits.report_low", "credits.ledger.report_low", 5.0),
}
CELERY_BEAT_SCHEDULE = {job: {"task": task, "schedule": seconds} for job, (task, _, seconds) in JOBS.items()}

# --- files -----------------------------------------------------------------------------------------------------------
MEDIA_ROOT = VAR_DIR / "files"
STATIC_ROOT = VAR_DIR / "static"
#: an S3-compatible bucket for files; if empty, files are stored under `VAR_DIR`
STORAGE_S3_BUCKET = ENV.text("STORAGE_S3_BUCKET")
#: the bucket's endpoint, if it is not on Amazon S3
STORAGE_S3_ENDPOINT = ENV.text("STORAGE_S3_ENDPOINT")
#: the bucket's region
STORAGE_S3_REGION = ENV.text("STORAGE_S3_REGION", "us-east-1")
#: the bucket's access key
STORAGE_S3_ACCESS_KEY = ENV.text("STORAGE_S3_ACCESS_KEY")
#: the bucket's secret key
STORAGE_S3_SECRET_KEY = ENV.text("STORAGE_S3_SECRET_KEY")
#: `auto`, `path` or `virtual`
STORAGE_S3_ADDRESSING = ENV.text("STORAGE_S3_ADDRESSING", "auto", ("auto", "path", "virtual"))
STORAGES = {
    # A repeated call of a tool replaces its files. The names of all other files are new.
    "default": {"BACKEND": "config.storage.ObjectStorage"}
    if STORAGE_S3_BUCKET
    else {"BACKEND": "django.core.files.storage.FileSystemStorage", "OPTIONS": {"allow_overwrite": True}},
    "staticfiles": {"BACKEND": "whitenoise.storage.CompressedStaticFilesStorage"},
}
WHITENOISE_USE_FINDERS = True

# --- security --------------------------------------------------------------------------------------------------------
# Local use is without TLS. If BASE_URL begins with https, the defaults are the safe values for production.
_https = BASE_URL.startswith("https://")
#: redirect http to https (default: on if `BASE_URL` starts with https)
SECURE_SSL_REDIRECT = ENV.flag("SECURE_SSL_REDIRECT", _https)
#: trust `X-Forwarded-Proto`; set it only if a proxy sets that header
SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https") if ENV.flag("TRUST_FORWARDED_PROTO", False) else None
#: HSTS (default: one year if `BASE_URL` starts with https)
SECURE_HSTS_SECONDS = ENV.whole("SECURE_HSTS_SECONDS", 31536000 if _https else 0)
SECURE_HSTS_INCLUDE_SUBDOMAINS = SECURE_HSTS_PRELOAD = SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = _https

# --- metrics ---------------------------------------------------------------------------------------------------------
#: bearer token that `/metrics` requires. If empty, nobody may scrape (embedded default: generated under `VAR_DIR`)
METRICS_TOKEN = ENV.text("METRICS_TOKEN") or (secret_from_file(VAR_DIR / "metrics_token") if EMBEDDED else "")
METRICS_FLUSH_SECONDS = 5
# How long the values that one scrape has read are reused for other scrapes.
METRICS_CACHE_SECONDS = 5
# Functions that return gauges for each scrape. These modules also declare the metrics of their apps.
METRICS_SOURCES = ["runs.metrics.gauges", "webhooks.metrics.gauges"]

#: where traces are sent, over OTLP/HTTP; needs `requirements-observability.txt`
OTEL_EXPORTER_OTLP_ENDPOINT = ENV.text("OTEL_EXPORTER_OTLP_ENDPOINT")
#: a trace's address in your tracing backend, with `{trace}` for its id; a run's page in the admin then links to it
TRACE_URL = ENV.text("TRACE_URL")
#: where exceptions are reported; needs `requirements-observability.txt`
SENTRY_DSN = ENV.text("SENTRY_DSN")

# --- admin (docs/admin.md) -------------------------------------------------------------------------------------------
AUTHENTICATION_BACKENDS = ["axes.backends.AxesStandaloneBackend", "django.contrib.auth.backends.ModelBackend"]
# How long an address is locked after 10 wrong passwords. The handler counts an attempt before its check.
ADMIN_SIGN_IN_LOCK_SECONDS = 900
AXES_FAILURE_LIMIT = 10 + 1
AXES_COOLOFF_TIME = timedelta(seconds=ADMIN_SIGN_IN_LOCK_SECONDS)
# Only staff have sessions, which end these hours after the sign-in, or after an hour without a request to a page.
ADMIN_SESSION_HOURS = 12
SESSION_COOKIE_AGE = 3600
SESSION_SAVE_EVERY_REQUEST = True
LOGIN_REDIRECT_URL = "admin:index"

# --- logs ------------------------------------------------------------------------------------------------------------
#: `DEBUG`, `INFO`, `WARNING` or `ERROR`
LOG_LEVEL = ENV.text("LOG_LEVEL", "INFO", ("DEBUG", "INFO", "WARNING", "ERROR"))
#: `json` or `text` (default: text in the embedded default, with `make run` and with `DEBUG`)
LOG_FORMAT = ENV.text("LOG_FORMAT", "text" if EMBEDDED or DEBUG else "json", ("text", "json"))
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "filters": {
        "outages": {"()": "config.telemetry.logs.OnceAMinute"},
        "safe": {"()": "config.telemetry.logs.SafeMessage"},
    },
    "formatters": {
        "text": {"()": "config.telemetry.logs.TextFormatter"},
        "json": {"()": "config.telemetry.logs.JsonFormatter"},
    },
    "handlers": {
        "console": {"class": "logging.StreamHandler", "formatter": LOG_FORMAT, "filters": ["outages", "safe"]}
    },
    "root": {"handlers": ["console"], "level": LOG_LEVEL},
    "loggers": {
        **{key: {"level": "WARNING"} for key in ("httpx2", "httpcore2", "openai", "anthropic", "_granian")},
        **{key: {"level": "WARNING"} for key in ("celery.app.trace", "celery.worker.strategy", "celery.beat")},
        # Warnings of urllib3 contain the full URL, which may have a receiver's token.
        **{key: {"level": "ERROR"} for key in ("django.request", "aiohttp", "urllib3")},
        # Any client can cause lines of DisallowedHost with stack traces. Lines of axes have the username of a failed
        # sign-in, and people type passwords into that field. The SDK of MCP (mcp, client) logs content from servers.
        **{key: {"level": "CRITICAL"} for key in ("django.security.DisallowedHost", "axes", "mcp", "client")},
    },
}
