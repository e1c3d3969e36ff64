"""All settings. Most are read from environment variables, which README.md lists.

All differences between local use and production are settings. Without ``DATABASE_URL`` and ``REDIS_URL``, the service
uses SQLite and the embedded broker, with their files in ``VAR_DIR``.
"""

import hashlib
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

from kombu import Exchange, Queue

from config.env import Env
from config.local.secrets import fernet_key, secret_from_file, signing_key

BASE_DIR = Path(__file__).resolve().parent.parent
ENV = Env()

# --- state -----------------------------------------------------------------------------------------------------------
VAR_DIR = Path(ENV.text("VAR_DIR", str(BASE_DIR / "var"))).absolute()
DATABASE_URL = ENV.text("DATABASE_URL")
REDIS_URL = ENV.text("REDIS_URL")
EMBEDDED = not DATABASE_URL and not REDIS_URL
EMBEDDED_DATABASE = not DATABASE_URL
EMBEDDED_BROKER = not REDIS_URL

# --- core ------------------------------------------------------------------------------------------------------------
DEBUG = ENV.flag("DEBUG", False)
SECRET_KEY_GIVEN = bool(ENV.text("SECRET_KEY"))
SECRET_KEY = ENV.text("SECRET_KEY") or secret_from_file(VAR_DIR / "secret_key")
# Old keys, whose signatures are still valid (docs/deploy.md).
SECRET_KEY_FALLBACKS = ENV.items("SECRET_KEY_FALLBACKS")
PORT = ENV.whole("PORT", 8000, 1, 65535)
BASE_URL = ENV.text("BASE_URL", f"http://127.0.0.1:{PORT}").rstrip("/")
ALLOWED_HOSTS = ENV.items("ALLOWED_HOSTS", ("127.0.0.1", "localhost", "[::1]"))
ROOT_URLCONF = "config.urls"
WSGI_APPLICATION = "config.wsgi.application"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
APPEND_SLASH = False
USE_TZ = True
TIME_ZONE = "UTC"
USE_I18N = False
FORMAT_MODULE_PATH = "config.formats"

INSTALLED_APPS = [
    "unfold",  # before the admin, whose site and templates it replaces
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "rest_framework",
    "drf_spectacular",
    "drf_spectacular_sidecar",
    "axes",
    "config",
    "config.api",
    "config.staff",
    "webhooks",
    "apikeys",
    "credits",
    "chats",
    "runs",
]

MIDDLEWARE = [
    "config.api.middleware.HeadMiddleware",
    "config.api.middleware.RequestIdMiddleware",
    "config.api.middleware.ProbeMiddleware",
    "config.api.middleware.MeasureMiddleware",
    "corsheaders.middleware.CorsMiddleware",
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "config.api.middleware.PagePolicyMiddleware",
    "config.api.middleware.ApiErrorMiddleware",
    "config.api.middleware.PageLimitMiddleware",
    "config.api.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "config.api.middleware.AuthenticationMiddleware",
    "config.api.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "config.staff.sessions.SessionAgeMiddleware",
    "config.staff.one_time.OwnPasswordMiddleware",
    "axes.middleware.AxesMiddleware",
]

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
DATABASE_LOCK_SECONDS = ENV.number("DATABASE_LOCK_SECONDS", 5, 0.1, 3600)
DATABASE_ANSWER_SECONDS = ENV.number("DATABASE_ANSWER_SECONDS", 20, 1, 3600)
# The interval at which each process reads the database's clock.
DATABASE_CLOCK_SECONDS = ENV.number("DATABASE_CLOCK_SECONDS", 30, 1, 3600)
# A command, for example a migration or a check of all rows, may take as long as it needs.
DATABASE_LIMITS_APPLY = Path(sys.argv[0]).name != "manage.py"
# PgBouncer in transaction mode does not keep a server-side cursor between statements.
_pgbouncer = ENV.flag("DATABASE_PGBOUNCER", False)
_connection_age = ENV.whole("DATABASE_CONN_MAX_AGE", 600)
_options: dict[str, Any] = {
    "connect_timeout": ENV.whole("DATABASE_CONNECT_SECONDS", 5, 2, 600),
    "tcp_user_timeout": round(ENV.number("DATABASE_TCP_SECONDS", 15, 1, 3600) * 1000),
    "keepalives": 1,
    "keepalives_idle": ENV.whole("DATABASE_KEEPALIVE_IDLE_SECONDS", 15, 1, 32767),
    "keepalives_interval": ENV.whole("DATABASE_KEEPALIVE_INTERVAL_SECONDS", 5, 1, 32767),
    "keepalives_count": ENV.whole("DATABASE_KEEPALIVE_COUNT", 3, 1, 127),
    # From its fifth execution on a connection, a statement is prepared: PostgreSQL plans it only once. This does not
    # work with PgBouncer, where each statement may reach another server process.
    "server_side_binding": True,
    "prepare_threshold": None if _pgbouncer else 5,
}
# Without this limit, the open transaction of a suspended process or a lost machine would keep its locks for hours, and
# no worker could take over its runs. PgBouncer does not forward the options: there, set them for the role.
_limits = {"idle_in_transaction_session_timeout": ENV.number("DATABASE_IDLE_TRANSACTION_SECONDS", 10, 1, 3600)}
if DATABASE_LIMITS_APPLY:
    # When the client stops waiting, the server stops working on the statement.
    _limits |= {"lock_timeout": DATABASE_LOCK_SECONDS, "statement_timeout": DATABASE_ANSWER_SECONDS}
if not _pgbouncer:
    _options["options"] = " ".join(f"-c {name}={round(seconds * 1000)}" for name, seconds in _limits.items())
DATABASES: dict[str, dict[str, Any]]
if EMBEDDED_DATABASE:
    DATABASES = {
        "default": {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": VAR_DIR / "db.sqlite3",
            "CONN_MAX_AGE": None,
            # A deferred transaction that begins to write after another transaction has written fails at once with
            # "database is locked"; SQLite's time-out does not apply. An IMMEDIATE transaction waits at its start.
            "OPTIONS": {
                "transaction_mode": "IMMEDIATE",
                "timeout": 20,
                "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
            },
            "TEST": {"NAME": VAR_DIR / "test.sqlite3"},
        }
    }
else:
    DATABASES = {"default": ENV.postgres("DATABASE_URL")}
    DATABASES["default"] |= {
        "CONN_MAX_AGE": _connection_age,
        "CONN_HEALTH_CHECKS": True,
        "DISABLE_SERVER_SIDE_CURSORS": _pgbouncer,
        "OPTIONS": _options | DATABASES["default"]["OPTIONS"],
    }

# --- broker ----------------------------------------------------------------------------------------------------------
# The path of a Unix socket is limited to about 100 characters. A longer path is replaced by one in the temporary
# directory.
BROKER_SOCKET = VAR_DIR / "broker.sock"
if len(str(BROKER_SOCKET)) > 90:
    BROKER_SOCKET = Path(tempfile.gettempdir()) / f"aws-{hashlib.sha256(str(VAR_DIR).encode()).hexdigest()[:16]}.sock"
CACHE_REDIS_URL = REDIS_URL or f"unix://{BROKER_SOCKET}"
BROKER_TIMEOUT_SECONDS = ENV.number("BROKER_TIMEOUT_SECONDS", 2.0, 0.1, 60)
READINESS_TIMEOUT_SECONDS = ENV.number("READINESS_TIMEOUT_SECONDS", 3.0, 0.1, 60)

# --- web server (gunicorn.conf.py) -----------------------------------------------------------------------------------
WEB_WORKERS = ENV.whole("WEB_WORKERS", 2, 1, 256)
WEB_THREADS = ENV.whole("WEB_THREADS", 16, 1, 1024)
WEB_KEEPALIVE_SECONDS = ENV.whole("WEB_KEEPALIVE_SECONDS", 75, 0, 3600)
WEB_READ_SECONDS = ENV.number("WEB_READ_SECONDS", 15, 0.1, 3600)
WEB_READ_BYTES_PER_SECOND = ENV.whole("WEB_READ_BYTES_PER_SECOND", 1024, 1)
WEB_BODY_SECONDS = ENV.number("WEB_BODY_SECONDS", 600, 1, 24 * 3600)
WEB_BODIES_MAX_BYTES = ENV.whole("WEB_BODIES_MAX_BYTES", 256 * 1024 * 1024, 1024 * 1024)
WEB_CONNECTIONS_MAX = ENV.whole("WEB_CONNECTIONS_MAX", 10_000, 16, 60_000)
WEB_GRACEFUL_SECONDS = ENV.whole("WEB_GRACEFUL_SECONDS", 25, 0, 3600)

# --- interface -------------------------------------------------------------------------------------------------------
REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": [],
    "DEFAULT_PERMISSION_CLASSES": [],
    "DEFAULT_PARSER_CLASSES": ["config.api.parsers.StrictJSONParser"],
    "DEFAULT_RENDERER_CLASSES": ["config.api.negotiation.ExactJSONRenderer"],
    "DEFAULT_CONTENT_NEGOTIATION_CLASS": "config.api.negotiation.JsonNegotiation",
    "DEFAULT_SCHEMA_CLASS": "config.api.openapi.extensions.ServiceSchema",
    "EXCEPTION_HANDLER": "config.api.errors.exception_handler",
    "UNAUTHENTICATED_USER": None,
    "URL_FORMAT_OVERRIDE": None,
}
PUBLIC_AUTHENTICATION_CLASS = "apikeys.authentication.ApiKeyAuthentication"
API_MAX_BODY_BYTES = ENV.whole("API_MAX_BODY_BYTES", 1024 * 1024, 1024)
API_MAX_JSON_DEPTH = ENV.whole("API_MAX_JSON_DEPTH", 64, 4, 500)
DATA_UPLOAD_MAX_MEMORY_SIZE = None  # API_MAX_BODY_BYTES limits bodies, with the error envelope as response
API_PAGE_SIZE = ENV.whole("API_PAGE_SIZE", 20, 1, 100)
API_PAGE_SIZE_MAX = ENV.whole("API_PAGE_SIZE_MAX", 100, 1, 1000)
IDEMPOTENCY_HOURS = ENV.whole("IDEMPOTENCY_HOURS", 24, 1, 24 * 30)
IDEMPOTENCY_LOCK_SECONDS = ENV.whole("IDEMPOTENCY_LOCK_SECONDS", 60, 1, 3600)
# Requests per minute; 0 means no limit.
RATE_LIMIT_SESSION = ENV.whole("RATE_LIMIT_SESSION", 600)
RATE_LIMIT_PUBLIC = ENV.whole("RATE_LIMIT_PUBLIC", 300)
RATE_LIMIT_RUN_STARTS = ENV.whole("RATE_LIMIT_RUN_STARTS", 60)
RATE_LIMIT_UNAUTHENTICATED = ENV.whole("RATE_LIMIT_UNAUTHENTICATED", 300)
RATE_LIMIT_PAGES = ENV.whole("RATE_LIMIT_PAGES", 300)
# The number of proxies in front of the service that append to X-Forwarded-For. With 0, the header is ignored.
TRUSTED_PROXIES = ENV.whole("TRUSTED_PROXIES", 0, 0, 10)
# The origins of web apps that may call the API. Callers send a token and never a cookie.
CORS_ALLOWED_ORIGINS = ENV.items("CORS_ALLOWED_ORIGINS")
CORS_URLS_REGEX = r"/(api/(public/)?v1|files|uploads)(/|$)"
CORS_ALLOW_HEADERS = (
    "accept",
    "authorization",
    "cache-control",
    "content-type",
    "idempotency-key",
    "if-none-match",
    "if-range",
    "last-event-id",
    "range",
    "traceparent",
    "tracestate",
    "x-request-id",
)
CORS_EXPOSE_HEADERS = (
    "X-Request-Id",
    "Retry-After",
    "X-RateLimit-Limit",
    "X-RateLimit-Remaining",
    "X-RateLimit-Reset",
    "Idempotent-Replayed",
    "Link",
    "Location",
)
SPECTACULAR_SETTINGS = {
    "TITLE": "Agent Workflow Service",
    "VERSION": "1.0.0",
    "LICENSE": {"name": "MIT", "identifier": "MIT"},
    "OAS_VERSION": "3.1.0",
    "SERVE_INCLUDE_SCHEMA": False,
    "SWAGGER_UI_DIST": "SIDECAR",
    "SWAGGER_UI_FAVICON_HREF": "SIDECAR",
    "REDOC_DIST": "SIDECAR",
    "COMPONENT_SPLIT_REQUEST": True,
    # A PATCH uses its serializer's own required fields.
    "COMPONENT_SPLIT_PATCH": False,
    "SCHEMA_PATH_PREFIX": r"/api/(public/)?v1",
    "ENUM_GENERATE_CHOICE_DESCRIPTION": False,
    "PREPROCESSING_HOOKS": ["config.api.openapi.document.load_parts"],
    "POSTPROCESSING_HOOKS": [
        "drf_spectacular.hooks.postprocess_schema_enums",
        "config.api.openapi.document.complete",
        "webhooks.openapi.add_webhooks",
    ],
    "ENUM_NAME_OVERRIDES": {
        "AttachmentStatusEnum": "chats.models.AttachmentStatus.values",
        "LedgerEntryTypeEnum": "credits.models.EntryType.choices",
        "MessageRoleEnum": ["user", "assistant"],
        "RunStatusEnum": "runs.models.RunStatus.values",
        "UploadMethodEnum": ["PUT"],
    },
}

# The order of tags and errors in the OpenAPI document.
OPENAPI_PARTS = [
    "chats.openapi.PART",
    "runs.openapi.PART",
    "credits.openapi.PART",
    "apikeys.openapi.PART",
    "webhooks.openapi.PART",
    "config.api.openapi.shared.PART",
]
OPENAPI_DESCRIPTION = "runs.openapi.DESCRIPTION"

# --- session tokens --------------------------------------------------------------------------------------------------
SESSION_ISSUER = ENV.text("SESSION_ISSUER")
SESSION_AUDIENCE = ENV.text("SESSION_AUDIENCE")
SESSION_JWKS_URL = ENV.text("SESSION_JWKS_URL")
SESSION_LEEWAY_SECONDS = ENV.whole("SESSION_LEEWAY_SECONDS", 30, 0, 600)
SESSION_JWKS_TIMEOUT_SECONDS = ENV.number("SESSION_JWKS_TIMEOUT_SECONDS", 3.0, 0.1, 30)
SESSION_JWKS_REFETCH_SECONDS = ENV.whole("SESSION_JWKS_REFETCH_SECONDS", 60, 1)
SESSION_JWKS_CACHE_SECONDS = ENV.whole("SESSION_JWKS_CACHE_SECONDS", 3600, 1)
# Signs the session tokens of the local issuer.
SESSION_KEY = "" if SESSION_ISSUER else secret_from_file(VAR_DIR / "session_key.pem", signing_key)

# --- API keys --------------------------------------------------------------------------------------------------------
API_KEY_MAX_LIVE = ENV.whole("API_KEY_MAX_LIVE", 50, 1)
API_KEY_DEFAULT_DAYS = ENV.whole("API_KEY_DEFAULT_DAYS", 90, 1, 365)
API_KEY_MAX_DAYS = 365
API_KEY_LAST_USED_SECONDS = ENV.whole("API_KEY_LAST_USED_SECONDS", 60, 1)

# --- credits ---------------------------------------------------------------------------------------------------------
SIGNUP_CREDITS = ENV.text("SIGNUP_CREDITS", "100")
# (user id, chat ids) → {chat id: title}, for the reports of credits, which may not import chats.
CREDITS_CHAT_TITLES = "chats.services.titles_of"
CREDIT_EXPIRY_SWEEP_SECONDS = ENV.number("CREDIT_EXPIRY_SWEEP_SECONDS", 60, 1, 24 * 3600)

# --- attachments -----------------------------------------------------------------------------------------------------
# Media types; "text/*" means all types of text.
ATTACHMENT_TYPES = ENV.items(
    "ATTACHMENT_TYPES",
    ("text/*", "application/json", "application/pdf", "image/png", "image/jpeg", "image/gif", "image/webp"),
)
ATTACHMENT_MAX_BYTES = ENV.whole("ATTACHMENT_MAX_BYTES", 20 * 1024 * 1024, 1)
# The total of one user, until they are purged. 0 means no limit.
ATTACHMENT_USER_MAX_BYTES = ENV.whole("ATTACHMENT_USER_MAX_BYTES", 1024**3)
# Also the validity of an upload URL. S3 signs URLs for at most one week.
ATTACHMENT_EXPIRY_SECONDS = ENV.whole("ATTACHMENT_EXPIRY_SECONDS", 24 * 3600, 60, 7 * 24 * 3600)
ATTACHMENT_SWEEP_SECONDS = ENV.number("ATTACHMENT_SWEEP_SECONDS", 300, 1, 24 * 3600)
# The days before the content of a deleted chat, and before an attachment that no message uses, is purged.
CHAT_RETENTION_DAYS = ENV.whole("CHAT_RETENTION_DAYS", 30, 0, 36500)
ATTACHMENT_UNUSED_DAYS = ENV.whole("ATTACHMENT_UNUSED_DAYS", 30, 1, 36500)
ATTACHMENTS_PER_MESSAGE_MAX = ENV.whole("ATTACHMENTS_PER_MESSAGE_MAX", 10, 1, 1000)
# Uploads and downloads in a process at the same time. Each occupies a thread for as long as its client needs.
ATTACHMENT_TRANSFERS_PER_USER = ENV.whole("ATTACHMENT_TRANSFERS_PER_USER", 10, 1, 1000)

# --- runs ------------------------------------------------------------------------------------------------------------
CREDIT_APPROVAL_THRESHOLD = ENV.text("CREDIT_APPROVAL_THRESHOLD", "10")
# Runs of one user that may run at the same time. Further runs stay queued in order. 0 means no limit.
RUN_USER_LIMIT = ENV.whole("RUN_USER_LIMIT", 20)
RUN_HISTORY_RUNS = ENV.whole("RUN_HISTORY_RUNS", 50, 0, 1000)
RUN_QUEUE_MAX = ENV.whole("RUN_QUEUE_MAX", 100, 1)
RUN_TURN_LIMIT = ENV.whole("RUN_TURN_LIMIT", 50, 1)
RUN_CALLS_MAX = ENV.whole("RUN_CALLS_MAX", 1000, 1)
RUN_TIMEOUT_SECONDS = ENV.number("RUN_TIMEOUT_SECONDS", 1800, 1)
WAITPOINT_EXPIRY_SECONDS = ENV.number("WAITPOINT_EXPIRY_SECONDS", 24 * 3600, 1)
TOOL_TIMEOUT_SECONDS = ENV.number("TOOL_TIMEOUT_SECONDS", 60, 0.1, 3600)
TOOL_RESULT_MAX_CHARS = ENV.whole("TOOL_RESULT_MAX_CHARS", 100_000, 100)
TOOL_RESULT_URLS_MAX = ENV.whole("TOOL_RESULT_URLS_MAX", 50, 1, 1000)
TOOL_INPUT_MAX_CHARS = ENV.whole("TOOL_INPUT_MAX_CHARS", 200_000, 100)
# Of a compiled pattern of a tool's schema: the time of a match grows with it and with the length of the text.
TOOL_PATTERN_MAX_BYTES = ENV.whole("TOOL_PATTERN_MAX_BYTES", 64 * 1024, 1024, 10 * 1024 * 1024)
TOOL_ANSWER_MAX_BYTES = ENV.whole("TOOL_ANSWER_MAX_BYTES", 1024 * 1024, 1024)
TOOL_CALLS_PER_TURN_MAX = ENV.whole("TOOL_CALLS_PER_TURN_MAX", 64, 1)
# One user's share of a worker process: calls at work, threads that compute, threads that read and write files, and
# bytes of attachments in requests to models. What exceeds the share waits and delays no other user.
TOOL_CALLS_PER_USER = ENV.whole("TOOL_CALLS_PER_USER", 32, 1, 100_000)
TOOL_THREADS_PER_USER = ENV.whole("TOOL_THREADS_PER_USER", 1, 1, 1024)
FILE_THREADS_PER_USER = ENV.whole("FILE_THREADS_PER_USER", 2, 1, 1024)
ATTACHMENT_READ_SECONDS = ENV.number("ATTACHMENT_READ_SECONDS", 60, 0.1, 3600)
ATTACHMENT_BYTES_PER_USER = ENV.whole("ATTACHMENT_BYTES_PER_USER", 128 * 1024 * 1024, 1)
MESSAGE_MAX_CHARS = 100_000
MODEL_TIMEOUT_SECONDS = ENV.number("MODEL_TIMEOUT_SECONDS", 600, 0.1, 7200)
MODEL_STALL_SECONDS = ENV.number("MODEL_STALL_SECONDS", 120, 0.1, 7200)
MODEL_OUTPUT_MAX_CHARS = ENV.whole("MODEL_OUTPUT_MAX_CHARS", 1_000_000, 1000)
MODEL_EVENT_MAX_BYTES = ENV.whole("MODEL_EVENT_MAX_BYTES", 2 * 1024 * 1024, 64 * 1024)
RUN_LEASE_SECONDS = ENV.number("RUN_LEASE_SECONDS", 10, 0.5, 600)
RUN_LEASE_LOSSES_MAX = ENV.whole("RUN_LEASE_LOSSES_MAX", 5, 1)
RUN_WORKER_CAPACITY = ENV.whole("RUN_WORKER_CAPACITY", 2000, 1)
RUN_WORKER_DB_THREADS = ENV.whole("RUN_WORKER_DB_THREADS", 8, 1, 64)
RUN_WORKER_DB_THREADS_PER_USER = ENV.whole("RUN_WORKER_DB_THREADS_PER_USER", max(1, RUN_WORKER_DB_THREADS // 2), 1, 64)
RUN_WORKER_TOOL_THREADS = ENV.whole("RUN_WORKER_TOOL_THREADS", 4, 1, 1024)
RUN_WORKER_FILE_THREADS = ENV.whole("RUN_WORKER_FILE_THREADS", 16, 1, 1024)
RUN_SHUTDOWN_GRACE_SECONDS = ENV.number("RUN_SHUTDOWN_GRACE_SECONDS", 15, 0, 600)
RUN_SWEEP_SECONDS = ENV.number("RUN_SWEEP_SECONDS", 2, 0.2, 600)
RUN_CANCEL_POLL_SECONDS = ENV.number("RUN_CANCEL_POLL_SECONDS", 0.2, 0.05, 10)
STREAM_FLUSH_SECONDS = ENV.number("STREAM_FLUSH_SECONDS", 0.05, 0.01, 5)
# Streams (docs/streams.md). STREAMS_PER_USER holds for all processes together, the other limits for each process.
STREAMS_PER_USER = ENV.whole("STREAMS_PER_USER", 50, 1, 100_000)
STREAM_HEARTBEAT_SECONDS = ENV.number("STREAM_HEARTBEAT_SECONDS", 15, 0.1, 600)
STREAM_CONNECTIONS_MAX = ENV.whole("STREAM_CONNECTIONS_MAX", 5000, 1)
STREAM_STALL_SECONDS = ENV.number("STREAM_STALL_SECONDS", 30, 0.1, 600)
STREAM_AUTH_SECONDS = ENV.number("STREAM_AUTH_SECONDS", 10, 0.1, 30)
# The intervals of the query for all streams of a process: with Redis, because a wake-up may be lost, and without Redis.
STREAM_CHECK_SECONDS = ENV.number("STREAM_CHECK_SECONDS", 2, 0.05, 60)
STREAM_POLL_SECONDS = ENV.number("STREAM_POLL_SECONDS", 0.2, 0.02, 10)
STREAM_DB_THREADS = ENV.whole("STREAM_DB_THREADS", 2, 1, 64)
RUN_EVENT_RETENTION_DAYS = ENV.whole("RUN_EVENT_RETENTION_DAYS", 30, 1)
# MCP (docs/mcp.md): the web origins that may send requests, and the calls that may wait for a run at the same time, per
# user and per process.
MCP_ALLOWED_ORIGINS = ENV.items("MCP_ALLOWED_ORIGINS")
MCP_BATCH_MAX = ENV.whole("MCP_BATCH_MAX", 20, 1, 1000)
MCP_WAITS_PER_USER = ENV.whole("MCP_WAITS_PER_USER", 4, 1, 10_000)
MCP_WAITS_MAX = ENV.whole("MCP_WAITS_MAX", 8, 0, 10_000)
PLAYGROUND = ENV.flag("PLAYGROUND", EMBEDDED or DEBUG)
# Only fault tests set this.
RUN_CRASH_POINT = ENV.text("RUN_CRASH_POINT")

# --- models ----------------------------------------------------------------------------------------------------------
OPENAI_API_KEY = ENV.text("OPENAI_API_KEY")
OPENAI_BASE_URL = ENV.text("OPENAI_BASE_URL", "https://api.openai.com/v1")
ANTHROPIC_API_KEY = ENV.text("ANTHROPIC_API_KEY")
ANTHROPIC_BASE_URL = ENV.text("ANTHROPIC_BASE_URL", "https://api.anthropic.com")
MODEL_MAX_OUTPUT_TOKENS = ENV.whole("MODEL_MAX_OUTPUT_TOKENS", 8192, 1)
MODEL_SYSTEM_PROMPT = ENV.text("MODEL_SYSTEM_PROMPT", "You are a helpful assistant. Use the tools when they help.")

# Limits of the attachments in one request to a model. The newest are sent first. The request names the omitted ones.
MODEL_ATTACHMENT_TEXT_MAX_CHARS = ENV.whole("MODEL_ATTACHMENT_TEXT_MAX_CHARS", 200_000)
MODEL_ATTACHMENT_MAX_BYTES = ENV.whole("MODEL_ATTACHMENT_MAX_BYTES", 20 * 1024 * 1024)

# --- outbound requests: webhooks and tools ----------------------------------------------------------------------------
OUTBOUND_ALLOW_PRIVATE = ENV.flag(ENV.moved("WEBHOOK_ALLOW_PRIVATE", "OUTBOUND_ALLOW_PRIVATE"), EMBEDDED)
OUTBOUND_CONNECT_TIMEOUT_SECONDS = ENV.number(
    ENV.moved("WEBHOOK_CONNECT_TIMEOUT_SECONDS", "OUTBOUND_CONNECT_TIMEOUT_SECONDS"), 5, 0.1, 60
)
OUTBOUND_LOOKUPS_MAX = ENV.whole(ENV.moved("WEBHOOK_LOOKUPS_MAX", "OUTBOUND_LOOKUPS_MAX"), 256, 1, 4096)
OUTBOUND_LOOKUPS_PER_USER = ENV.whole("OUTBOUND_LOOKUPS_PER_USER", 64, 1, 4096)

# --- webhooks --------------------------------------------------------------------------------------------------------
WEBHOOK_GRACE_SECONDS = ENV.whole("WEBHOOK_GRACE_SECONDS", 24 * 3600, 0)
WEBHOOK_ATTEMPT_TIMEOUT_SECONDS = ENV.number("WEBHOOK_ATTEMPT_TIMEOUT_SECONDS", 15, 0.1, 120)
WEBHOOK_ANSWER_MAX_BYTES = ENV.whole("WEBHOOK_ANSWER_MAX_BYTES", 64 * 1024, 0)
WEBHOOK_BATCH_SIZE = ENV.whole("WEBHOOK_BATCH_SIZE", 200, 1, 1000)
WEBHOOK_ENDPOINT_CONCURRENCY = ENV.whole("WEBHOOK_ENDPOINT_CONCURRENCY", 4, 1, 100)
WEBHOOK_WORKER_CAPACITY = ENV.whole("WEBHOOK_WORKER_CAPACITY", 512, 1, 4096)
WEBHOOK_CLAIM_MARGIN_SECONDS = ENV.number("WEBHOOK_CLAIM_MARGIN_SECONDS", 15, 1, 600)
WEBHOOK_SWEEP_SECONDS = ENV.number("WEBHOOK_SWEEP_SECONDS", 5, 0.2, 600)
WEBHOOK_PENDING_MAX = ENV.whole("WEBHOOK_PENDING_MAX", 10_000, 1)
WEBHOOK_RETENTION_DAYS = ENV.whole("WEBHOOK_RETENTION_DAYS", 30, 1)
# Fernet keys for stored secrets, the newest first.
ENCRYPTION_KEYS = ENV.items("ENCRYPTION_KEYS") or [secret_from_file(VAR_DIR / "encryption_key", fernet_key)]
ENCRYPTION_KEYS_GIVEN = bool(ENV.items("ENCRYPTION_KEYS"))

# --- Celery ----------------------------------------------------------------------------------------------------------
CELERY_BROKER_URL = REDIS_URL or f"redis+socket://{BROKER_SOCKET}"
CELERY_BROKER_TRANSPORT_OPTIONS = {
    # Longer than the countdown of a webhook retry (at most 600 s). The broker keeps no other fetched messages. A
    # second delivery of a message has no effect.
    "visibility_timeout": 3600,
    "socket_timeout": BROKER_TIMEOUT_SECONDS,
    "socket_connect_timeout": BROKER_TIMEOUT_SECONDS,
    "socket_keepalive": True,
    "max_retries": 1,
    "interval_start": 0,
    "interval_max": 0.1,
}
CELERY_BROKER_CONNECTION_TIMEOUT = BROKER_TIMEOUT_SECONDS
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_BROKER_CONNECTION_MAX_RETRIES = None
CELERY_TASK_IGNORE_RESULT = True
CELERY_TASK_SERIALIZER = "json"
CELERY_ACCEPT_CONTENT = ["json"]
CELERY_TASK_ACKS_LATE = False
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
# A worker keeps tasks with a countdown in memory. The sweep finds the work of messages above this limit.
CELERY_WORKER_ETA_TASK_LIMIT = 10_000
CELERY_WORKER_HIJACK_ROOT_LOGGER = False
CELERY_WORKER_SEND_TASK_EVENTS = False
CELERY_TASK_DEFAULT_QUEUE = "maintenance"
# With no_ack, the broker does not keep a message that a worker has fetched: keeping it would be the largest part of its
# cost, and sweeps find the work of a lost message. Messages with a countdown are kept, because
# CELERY_WORKER_ETA_TASK_LIMIT counts kept messages only.
CELERY_TASK_QUEUES = [
    Queue(name, Exchange(name), routing_key=name, no_ack=name != "webhooks-retry")
    for name in ("runs", "webhooks", "webhooks-retry", "maintenance")
]
CELERY_TASK_ROUTES = {
    "runs.execute_run": {"queue": "runs"},
    "webhooks.deliver_due": {"queue": "webhooks"},
    "webhooks.retry_due": {"queue": "webhooks-retry"},
}
# After a row could not be processed, a process leaves it out for this time.
HOUSEKEEPING_RETRY_SECONDS = ENV.number("HOUSEKEEPING_RETRY_SECONDS", 60, 0, 86400)
# For this time, a sweep waits for a row that another transaction has locked.
HOUSEKEEPING_LOCK_SECONDS = ENV.number("HOUSEKEEPING_LOCK_SECONDS", 0.2, 0.01, 60)
CELERY_BEAT_SCHEDULE_FILENAME = str(VAR_DIR / "celerybeat-schedule")
CELERY_BEAT_SCHEDULE = {
    "sweep-runs": {"task": "runs.sweep", "schedule": RUN_SWEEP_SECONDS},
    "sweep-webhooks": {"task": "webhooks.sweep", "schedule": WEBHOOK_SWEEP_SECONDS},
    "trim-webhooks": {"task": "webhooks.trim", "schedule": 60.0},
    "prune-run-events": {"task": "runs.prune_events", "schedule": 3600.0},
    "prune-webhooks": {"task": "webhooks.prune", "schedule": 3600.0},
    "prune-idempotency": {"task": "api.prune_idempotency", "schedule": 3600.0},
    "prune-sessions": {"task": "api.prune_sessions", "schedule": 3600.0},
    "expire-attachments": {"task": "chats.expire_attachments", "schedule": ATTACHMENT_SWEEP_SECONDS},
    "purge-chats": {"task": "chats.purge", "schedule": 3600.0},
    "purge-attachments": {"task": "chats.purge_attachments", "schedule": 3600.0},
    "expire-grants": {"task": "credits.expire_grants", "schedule": CREDIT_EXPIRY_SWEEP_SECONDS},
}

# --- files -----------------------------------------------------------------------------------------------------------
MEDIA_ROOT = VAR_DIR / "files"
STATIC_URL = "/static/"
STATIC_ROOT = VAR_DIR / "static"
STATICFILES_DIRS = [BASE_DIR / "config" / "static"]
# With a bucket, files are stored in an S3-compatible object storage and not in MEDIA_ROOT.
STORAGE_S3_BUCKET = ENV.text("STORAGE_S3_BUCKET")
STORAGE_S3_ENDPOINT = ENV.text("STORAGE_S3_ENDPOINT")
STORAGE_S3_REGION = ENV.text("STORAGE_S3_REGION", "us-east-1")
STORAGE_S3_ACCESS_KEY = ENV.text("STORAGE_S3_ACCESS_KEY")
STORAGE_S3_SECRET_KEY = ENV.text("STORAGE_S3_SECRET_KEY")
STORAGE_S3_ADDRESSING = ENV.text("STORAGE_S3_ADDRESSING", "auto", ("auto", "path", "virtual"))
STORAGE_S3_TIMEOUT_SECONDS = ENV.number("STORAGE_S3_TIMEOUT_SECONDS", 10, 0.1, 600)
STORAGES = {
    "default": {
        "BACKEND": "config.storage.ObjectStorage"
        if STORAGE_S3_BUCKET
        else "django.core.files.storage.FileSystemStorage"
    },
    "staticfiles": {"BACKEND": "whitenoise.storage.CompressedStaticFilesStorage"},
}
WHITENOISE_USE_FINDERS = True
WHITENOISE_AUTOREFRESH = DEBUG

# --- security --------------------------------------------------------------------------------------------------------
# Local use is without TLS. If BASE_URL begins with https, the defaults are the safe values for production.
_https = BASE_URL.startswith("https://")
SECURE_SSL_REDIRECT = ENV.flag("SECURE_SSL_REDIRECT", _https)
SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https") if ENV.flag("TRUST_FORWARDED_PROTO", False) else None
SECURE_HSTS_SECONDS = ENV.whole("SECURE_HSTS_SECONDS", 31536000 if _https else 0)
SECURE_HSTS_INCLUDE_SUBDOMAINS = _https
SECURE_HSTS_PRELOAD = _https
SECURE_CONTENT_TYPE_NOSNIFF = True
SESSION_COOKIE_SECURE = _https
CSRF_COOKIE_SECURE = _https
X_FRAME_OPTIONS = "DENY"
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator", "OPTIONS": {"min_length": 12}},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
    {"NAME": "django.contrib.auth.password_validation.NumericPasswordValidator"},
]

# --- metrics ---------------------------------------------------------------------------------------------------------
METRICS_TOKEN_GIVEN = bool(ENV.text("METRICS_TOKEN"))
# Without a token, metrics are served with DEBUG only.
METRICS_TOKEN = ENV.text("METRICS_TOKEN") or (secret_from_file(VAR_DIR / "metrics_token") if EMBEDDED else "")
# The interval at which a process sends its metrics to Redis, and the time for which the metrics page is cached.
METRICS_FLUSH_SECONDS = ENV.number("METRICS_FLUSH_SECONDS", 5, 0.1, 60)
METRICS_CACHE_SECONDS = ENV.number("METRICS_CACHE_SECONDS", 5, 0, 300)
# Functions that return gauges for each scrape. These modules also declare the metrics of their apps.
METRICS_SOURCES = ["runs.metrics.gauges", "webhooks.metrics.gauges", "credits.metrics.gauges"]

# Both need the packages of requirements-observability.txt, which are imported only if the setting is set.
OTEL_EXPORTER_OTLP_ENDPOINT = ENV.text("OTEL_EXPORTER_OTLP_ENDPOINT")
SENTRY_DSN = ENV.text("SENTRY_DSN")
if OTEL_EXPORTER_OTLP_ENDPOINT:
    MIDDLEWARE.insert(3, "config.telemetry.tracing.TracingMiddleware")  # after the request's id and the probes

# --- admin (docs/admin.md) -------------------------------------------------------------------------------------------
AUTHENTICATION_BACKENDS = [
    "axes.backends.AxesStandaloneBackend",
    "django.contrib.auth.backends.ModelBackend",
    "config.staff.one_time.OneTimeBackend",
]
ADMIN_SIGN_IN_FAILURES = ENV.whole("ADMIN_SIGN_IN_FAILURES", 10, 1, 1000)
ADMIN_SIGN_IN_LOCK_SECONDS = ENV.whole("ADMIN_SIGN_IN_LOCK_SECONDS", 900, 1, 24 * 3600)
ADMIN_SESSION_HOURS = ENV.whole("ADMIN_SESSION_HOURS", 12, 1, 24 * 14)
ADMIN_SESSION_IDLE_MINUTES = ENV.whole("ADMIN_SESSION_IDLE_MINUTES", 60, 1, 24 * 60)
# Only staff have sessions. Each request to a page renews the idle time.
SESSION_COOKIE_AGE = ADMIN_SESSION_IDLE_MINUTES * 60
SESSION_SAVE_EVERY_REQUEST = True
ADMIN_DASHBOARD_SECONDS = ENV.whole("ADMIN_DASHBOARD_SECONDS", 30, 0, 3600)
# By IP address only, because with a lock by username, any client could lock staff out.
AXES_LOCKOUT_PARAMETERS = ["ip_address"]
# The handler counts an attempt before its check, so the limit is one higher.
AXES_HANDLER = "config.staff.sign_in.CountingHandler"
AXES_FAILURE_LIMIT = ADMIN_SIGN_IN_FAILURES + 1
AXES_COOLOFF_TIME = timedelta(seconds=ADMIN_SIGN_IN_LOCK_SECONDS)
AXES_RESET_COOL_OFF_ON_FAILURE_DURING_LOCKOUT = False
AXES_CLIENT_IP_CALLABLE = "config.staff.sign_in.client_ip"
AXES_LOCKOUT_CALLABLE = "config.staff.sign_in.locked"
AXES_DISABLE_ACCESS_LOG = True
AXES_ENABLE_ADMIN = False
AXES_VERBOSE = False
# The groups of the sidebar, with label, icon and model of each list.
STAFF_NAVIGATION = [
    (
        "Runs",
        [
            ("Runs", "play_circle", "runs.run"),
            ("Tool calls", "build", "runs.toolinvocation"),
            ("Waitpoints", "pause_circle", "runs.waitpoint"),
            ("Turns", "sync", "runs.turn"),
            ("Stream events", "stream", "runs.runevent"),
            ("Chats", "forum", "chats.chat"),
            ("Attachments", "attach_file", "chats.attachment"),
        ],
    ),
    (
        "Credits",
        [("Accounts", "account_balance_wallet", "credits.account"), ("Ledger", "receipt_long", "credits.ledgerentry")],
    ),
    (
        "Webhooks",
        [
            ("Endpoints", "webhook", "webhooks.endpoint"),
            ("Deliveries", "outbox", "webhooks.delivery"),
            ("Attempts", "send", "webhooks.attempt"),
        ],
    ),
    ("Catalogue", [("Models", "neurology", "runs.agentmodel"), ("Tools", "construction", "runs.tool")]),
    (
        "People",
        [
            ("Users", "person", "auth.user"),
            ("Roles", "group", "auth.group"),
            ("API keys", "key", "apikeys.apikey"),
            ("Staff's actions", "history", "admin.logentry"),
        ],
    ),
]
# Links on the page of a user: label, model, and the lookup for the user's id.
STAFF_USER_LINKS = [
    ("runs", "runs.run", "user__id__exact"),
    ("ledger", "credits.ledgerentry", "account__user__id__exact"),
]
UNFOLD = {
    "SITE_TITLE": "Agent workflow service",
    "SITE_HEADER": "Agent workflow service",
    "SITE_SUBHEADER": "Staff",
    "SITE_SYMBOL": "account_tree",
    "SITE_URL": "/api/docs",
    "SITE_FAVICONS": [{"rel": "icon", "type": "image/svg+xml", "href": STATIC_URL + "staff/favicon.svg"}],
    "SHOW_BACK_BUTTON": True,
    "STYLES": [STATIC_URL + "staff/staff.css"],
    "DASHBOARD_CALLBACK": "runs.admin.dashboard.show",
    "SIDEBAR": {"navigation": "config.staff.navigation.sidebar", "command_search": True},
    "COMMAND": {"search_callback": "config.staff.navigation.find_by_id"},
    "COLORS": {
        "primary": {
            "50": "oklch(97% .014 254.6)",
            "100": "oklch(93.2% .032 255.6)",
            "200": "oklch(88.2% .059 254.1)",
            "300": "oklch(80.9% .105 251.8)",
            "400": "oklch(70.7% .165 254.6)",
            "500": "oklch(62.3% .214 259.8)",
            "600": "oklch(54.6% .245 262.9)",
            "700": "oklch(48.8% .243 264.4)",
            "800": "oklch(42.4% .199 265.6)",
            "900": "oklch(37.9% .146 265.5)",
            "950": "oklch(28.2% .091 267.9)",
        }
    },
}

# --- logs ------------------------------------------------------------------------------------------------------------
LOG_LEVEL = ENV.text("LOG_LEVEL", "INFO", ("DEBUG", "INFO", "WARNING", "ERROR"))
LOG_FORMAT = ENV.text("LOG_FORMAT", "text" if EMBEDDED or DEBUG else "json", ("text", "json"))
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "filters": {"context": {"()": "config.telemetry.logs.ContextFilter"}},
    "formatters": {
        "text": {"()": "config.telemetry.logs.TextFormatter", "with_messages": DEBUG},
        "json": {"()": "config.telemetry.logs.JsonFormatter", "with_messages": DEBUG},
    },
    "handlers": {"console": {"class": "logging.StreamHandler", "formatter": LOG_FORMAT, "filters": ["context"]}},
    "root": {"handlers": ["console"], "level": LOG_LEVEL},
    "loggers": {
        "django.request": {"level": "ERROR"},
        # Any client can cause these log lines, each with a stack trace. The response is 400.
        "django.security.DisallowedHost": {"level": "CRITICAL"},
        # Its lines contain the username of a failed sign-in, and people type passwords into that field.
        "axes": {"level": "CRITICAL"},
        **{key: {"level": "WARNING"} for key in ("httpx2", "httpcore2", "openai", "anthropic")},
        "aiohttp": {"level": "ERROR"},
        "urllib3": {"level": "ERROR"},  # its warnings contain the full URL, which may have a receiver's token
        # The SDK logs content from MCP servers. The invocation records the result.
        "mcp": {"level": "CRITICAL"},
        "client": {"level": "CRITICAL"},
        # The server's lines use the root handler.
        "gunicorn.error": {"handlers": [], "propagate": True, "level": "WARNING"},
        **{key: {"level": "WARNING"} for key in ("celery.app.trace", "celery.worker.strategy", "celery.beat")},
    },
}
