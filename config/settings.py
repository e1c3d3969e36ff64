"""All settings, read from environment variables; README.md lists each one.

What differs between local use and production is decided here and nowhere else. Without ``DATABASE_URL`` and
``REDIS_URL`` the service runs on the embedded default: SQLite and a broker of its own under ``var/``.
"""

import hashlib
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

from kombu import Exchange, Queue

from config.env import Env
from config.local.secrets import fernet_key, secret_from_file, signing_key

BASE_DIR = Path(__file__).resolve().parent.parent
ENV = Env()

# --- where state lives -----------------------------------------------------------------------------------------------
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
# Signatures made with these still verify; see "rotating secrets" in docs/deploy.md.
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
    "config.api.middleware.RequestIdMiddleware",
    "config.api.middleware.ProbeMiddleware",
    "config.api.middleware.MeasureMiddleware",
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "config.api.middleware.PagePolicyMiddleware",
    "config.api.middleware.ApiErrorMiddleware",
    "config.api.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "config.api.middleware.AuthenticationMiddleware",
    "config.api.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
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
DATABASES: dict[str, dict[str, Any]]
if EMBEDDED_DATABASE:
    DATABASES = {
        "default": {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": VAR_DIR / "db.sqlite3",
            "CONN_MAX_AGE": None,
            # IMMEDIATE: a deferred transaction that turns into a writer fails at once with "database is locked" when
            # another has written meanwhile; the busy time-out does not apply to it.
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
    DATABASES["default"]["CONN_MAX_AGE"] = ENV.whole("DATABASE_CONN_MAX_AGE", 600)
    DATABASES["default"]["CONN_HEALTH_CHECKS"] = True
    # PgBouncer in transaction mode can't hold a server-side cursor between statements.
    DATABASES["default"]["DISABLE_SERVER_SIDE_CURSORS"] = ENV.flag("DATABASE_PGBOUNCER", False)
    DATABASES["default"]["OPTIONS"].setdefault("connect_timeout", 5)
    # A statement that a connection sees for the fifth time is prepared: PostgreSQL plans it once, and its values travel
    # beside it. Not through PgBouncer, where the next statement may reach another server process.
    DATABASES["default"]["OPTIONS"].setdefault("server_side_binding", True)
    DATABASES["default"]["OPTIONS"].setdefault(
        "prepare_threshold", None if DATABASES["default"]["DISABLE_SERVER_SIDE_CURSORS"] else 5
    )
    # A process that is suspended, or a machine that is gone, in the middle of a transaction would keep its locks for
    # hours, and runs from being taken over. PgBouncer passes no such option on: set it for the role there.
    _idle_seconds = ENV.number("DATABASE_IDLE_TRANSACTION_SECONDS", 10, 1, 3600)
    if not DATABASES["default"]["DISABLE_SERVER_SIDE_CURSORS"]:
        DATABASES["default"]["OPTIONS"].setdefault(
            "options", f"-c idle_in_transaction_session_timeout={round(_idle_seconds * 1000)}"
        )

# --- broker ----------------------------------------------------------------------------------------------------------
# A Unix socket's path may hold about 100 characters, so that of a deep checkout moves to the temporary directory.
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
DATA_UPLOAD_MAX_MEMORY_SIZE = None  # the limit above is the one that answers with our envelope
API_PAGE_SIZE = ENV.whole("API_PAGE_SIZE", 20, 1, 100)
API_PAGE_SIZE_MAX = ENV.whole("API_PAGE_SIZE_MAX", 100, 1, 1000)
IDEMPOTENCY_HOURS = ENV.whole("IDEMPOTENCY_HOURS", 24, 1, 24 * 30)
IDEMPOTENCY_LOCK_SECONDS = ENV.whole("IDEMPOTENCY_LOCK_SECONDS", 60, 1, 3600)
# Requests a minute; 0 switches a limit off.
RATE_LIMIT_SESSION = ENV.whole("RATE_LIMIT_SESSION", 600)
RATE_LIMIT_PUBLIC = ENV.whole("RATE_LIMIT_PUBLIC", 300)
RATE_LIMIT_RUN_STARTS = ENV.whole("RATE_LIMIT_RUN_STARTS", 60)
RATE_LIMIT_UNAUTHENTICATED = ENV.whole("RATE_LIMIT_UNAUTHENTICATED", 300)
# Proxies in front of the service that append to X-Forwarded-For; with 0 the header is ignored.
TRUSTED_PROXIES = ENV.whole("TRUSTED_PROXIES", 0, 0, 10)
SPECTACULAR_SETTINGS = {
    "TITLE": "Agent Workflow Service",
    "VERSION": "1.0.0",
    "OAS_VERSION": "3.1.0",
    "SERVE_INCLUDE_SCHEMA": False,
    "SWAGGER_UI_DIST": "SIDECAR",
    "SWAGGER_UI_FAVICON_HREF": "SIDECAR",
    "REDOC_DIST": "SIDECAR",
    "COMPONENT_SPLIT_REQUEST": True,
    # A PATCH here changes one thing, which it must name.
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
        "UploadMethodEnum": ["PUT"],
    },
}

# The document describes tags and errors in this order.
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
# The key of the service's own issuer.
SESSION_KEY = "" if SESSION_ISSUER else secret_from_file(VAR_DIR / "session_key.pem", signing_key)

# --- API keys --------------------------------------------------------------------------------------------------------
API_KEY_MAX_LIVE = ENV.whole("API_KEY_MAX_LIVE", 50, 1)
API_KEY_DEFAULT_DAYS = ENV.whole("API_KEY_DEFAULT_DAYS", 90, 1, 365)
API_KEY_MAX_DAYS = 365
API_KEY_LAST_USED_SECONDS = ENV.whole("API_KEY_LAST_USED_SECONDS", 60, 1)

# --- credits ---------------------------------------------------------------------------------------------------------
SIGNUP_CREDITS = ENV.text("SIGNUP_CREDITS", "100")
# (user id, chat ids) → {chat id: title}: the reports name chats, whose app this one may not import.
CREDITS_CHAT_TITLES = "chats.services.titles_of"
CREDIT_EXPIRY_SWEEP_SECONDS = ENV.number("CREDIT_EXPIRY_SWEEP_SECONDS", 60, 1, 24 * 3600)

# --- attachments -----------------------------------------------------------------------------------------------------
# Media types; "text/*" is every type of text.
ATTACHMENT_TYPES = ENV.items(
    "ATTACHMENT_TYPES",
    ("text/*", "application/json", "application/pdf", "image/png", "image/jpeg", "image/gif", "image/webp"),
)
ATTACHMENT_MAX_BYTES = ENV.whole("ATTACHMENT_MAX_BYTES", 20 * 1024 * 1024, 1)
# All of one user's, those in deleted chats not counted; 0 is no limit.
ATTACHMENT_USER_MAX_BYTES = ENV.whole("ATTACHMENT_USER_MAX_BYTES", 1024**3)
# An upload's address is good for as long, and S3 signs for a week at most.
ATTACHMENT_EXPIRY_SECONDS = ENV.whole("ATTACHMENT_EXPIRY_SECONDS", 24 * 3600, 60, 7 * 24 * 3600)
ATTACHMENT_SWEEP_SECONDS = ENV.number("ATTACHMENT_SWEEP_SECONDS", 300, 1, 24 * 3600)
# A deleted chat's content is kept so long, in case; an attachment that no message uses, too.
CHAT_RETENTION_DAYS = ENV.whole("CHAT_RETENTION_DAYS", 30, 0, 36500)
ATTACHMENT_UNUSED_DAYS = ENV.whole("ATTACHMENT_UNUSED_DAYS", 30, 1, 36500)
ATTACHMENTS_PER_MESSAGE_MAX = ENV.whole("ATTACHMENTS_PER_MESSAGE_MAX", 10, 1, 1000)

# --- runs ------------------------------------------------------------------------------------------------------------
CREDIT_APPROVAL_THRESHOLD = ENV.text("CREDIT_APPROVAL_THRESHOLD", "10")
# Runs of one user that may be running at a time, the rest queued in order; 0 is no limit.
RUN_USER_LIMIT = ENV.whole("RUN_USER_LIMIT", 20)
RUN_HISTORY_RUNS = ENV.whole("RUN_HISTORY_RUNS", 50, 0, 1000)
RUN_TURN_LIMIT = ENV.whole("RUN_TURN_LIMIT", 50, 1)
RUN_TIMEOUT_SECONDS = ENV.number("RUN_TIMEOUT_SECONDS", 1800, 1)
WAITPOINT_EXPIRY_SECONDS = ENV.number("WAITPOINT_EXPIRY_SECONDS", 24 * 3600, 1)
TOOL_TIMEOUT_SECONDS = ENV.number("TOOL_TIMEOUT_SECONDS", 60, 0.1, 3600)
TOOL_RESULT_MAX_CHARS = ENV.whole("TOOL_RESULT_MAX_CHARS", 100_000, 100)
TOOL_RESULT_URLS_MAX = ENV.whole("TOOL_RESULT_URLS_MAX", 50, 1, 1000)
TOOL_INPUT_MAX_CHARS = ENV.whole("TOOL_INPUT_MAX_CHARS", 200_000, 100)
TOOL_ANSWER_MAX_BYTES = ENV.whole("TOOL_ANSWER_MAX_BYTES", 1024 * 1024, 1024)
TOOL_FILE_MAX_AGE_SECONDS = ENV.whole("TOOL_FILE_MAX_AGE_SECONDS", 3600)
TOOL_CALLS_PER_TURN_MAX = ENV.whole("TOOL_CALLS_PER_TURN_MAX", 64, 1)
MESSAGE_MAX_CHARS = 100_000
MODEL_TIMEOUT_SECONDS = ENV.number("MODEL_TIMEOUT_SECONDS", 600, 0.1, 7200)
MODEL_STALL_SECONDS = ENV.number("MODEL_STALL_SECONDS", 120, 0.1, 7200)
MODEL_OUTPUT_MAX_CHARS = ENV.whole("MODEL_OUTPUT_MAX_CHARS", 1_000_000, 1000)
RUN_LEASE_SECONDS = ENV.number("RUN_LEASE_SECONDS", 10, 0.5, 600)
RUN_LEASE_LOSSES_MAX = ENV.whole("RUN_LEASE_LOSSES_MAX", 5, 1)
RUN_WORKER_CAPACITY = ENV.whole("RUN_WORKER_CAPACITY", 2000, 1)
RUN_WORKER_DB_THREADS = ENV.whole("RUN_WORKER_DB_THREADS", 8, 1, 64)
RUN_WORKER_TOOL_THREADS = ENV.whole("RUN_WORKER_TOOL_THREADS", 64, 1, 1024)
RUN_SHUTDOWN_GRACE_SECONDS = ENV.number("RUN_SHUTDOWN_GRACE_SECONDS", 15, 0, 600)
RUN_SWEEP_SECONDS = ENV.number("RUN_SWEEP_SECONDS", 2, 0.2, 600)
RUN_CANCEL_POLL_SECONDS = ENV.number("RUN_CANCEL_POLL_SECONDS", 0.2, 0.05, 10)
STREAM_FLUSH_SECONDS = ENV.number("STREAM_FLUSH_SECONDS", 0.05, 0.01, 5)
# Streams (docs/streams.md); each limit is a process's.
STREAM_SERVERS = "runs.streams.servers"
STREAM_HEARTBEAT_SECONDS = ENV.number("STREAM_HEARTBEAT_SECONDS", 15, 0.1, 600)
STREAM_CONNECTIONS_MAX = ENV.whole("STREAM_CONNECTIONS_MAX", 5000, 1)
STREAM_STALL_SECONDS = ENV.number("STREAM_STALL_SECONDS", 30, 0.1, 600)
STREAM_AUTH_SECONDS = ENV.number("STREAM_AUTH_SECONDS", 10, 0.1, 30)
# One query for all streams of a process: so often while Redis is there, in case a message was lost; and while not.
STREAM_CHECK_SECONDS = ENV.number("STREAM_CHECK_SECONDS", 2, 0.05, 60)
STREAM_POLL_SECONDS = ENV.number("STREAM_POLL_SECONDS", 0.2, 0.02, 10)
STREAM_DB_THREADS = ENV.whole("STREAM_DB_THREADS", 2, 1, 64)
STREAM_OPEN_THREADS = ENV.whole("STREAM_OPEN_THREADS", 4, 1, 64)
RUN_EVENT_RETENTION_DAYS = ENV.whole("RUN_EVENT_RETENTION_DAYS", 30, 1)
# MCP (docs/mcp.md): other web origins whose pages may call, and calls of a process that may wait for a run side by
# side.
MCP_ALLOWED_ORIGINS = ENV.items("MCP_ALLOWED_ORIGINS")
MCP_WAITS_MAX = ENV.whole("MCP_WAITS_MAX", 8, 0, 10_000)
PLAYGROUND = ENV.flag("PLAYGROUND", EMBEDDED or DEBUG)
# Crash points for fault tests; empty in every other use.
RUN_CRASH_POINT = ENV.text("RUN_CRASH_POINT")

# --- models ----------------------------------------------------------------------------------------------------------
OPENAI_API_KEY = ENV.text("OPENAI_API_KEY")
OPENAI_BASE_URL = ENV.text("OPENAI_BASE_URL", "https://api.openai.com/v1")
ANTHROPIC_API_KEY = ENV.text("ANTHROPIC_API_KEY")
ANTHROPIC_BASE_URL = ENV.text("ANTHROPIC_BASE_URL", "https://api.anthropic.com")
MODEL_MAX_OUTPUT_TOKENS = ENV.whole("MODEL_MAX_OUTPUT_TOKENS", 8192, 1)
MODEL_SYSTEM_PROMPT = ENV.text("MODEL_SYSTEM_PROMPT", "You are a helpful assistant. Use the tools when they help.")

# Attachments in one request to a model, the newest first; the model is told of those that did not fit.
MODEL_ATTACHMENT_TEXT_MAX_CHARS = ENV.whole("MODEL_ATTACHMENT_TEXT_MAX_CHARS", 200_000)
MODEL_ATTACHMENT_MAX_BYTES = ENV.whole("MODEL_ATTACHMENT_MAX_BYTES", 20 * 1024 * 1024)

# --- outbound requests: webhooks and tools ----------------------------------------------------------------------------
OUTBOUND_ALLOW_PRIVATE = ENV.flag(ENV.moved("WEBHOOK_ALLOW_PRIVATE", "OUTBOUND_ALLOW_PRIVATE"), EMBEDDED)
OUTBOUND_CONNECT_TIMEOUT_SECONDS = ENV.number(
    ENV.moved("WEBHOOK_CONNECT_TIMEOUT_SECONDS", "OUTBOUND_CONNECT_TIMEOUT_SECONDS"), 5, 0.1, 60
)
OUTBOUND_LOOKUPS_MAX = ENV.whole(ENV.moved("WEBHOOK_LOOKUPS_MAX", "OUTBOUND_LOOKUPS_MAX"), 256, 1, 4096)

# --- webhooks --------------------------------------------------------------------------------------------------------
WEBHOOK_GRACE_SECONDS = ENV.whole("WEBHOOK_GRACE_SECONDS", 24 * 3600, 0)
WEBHOOK_ATTEMPT_TIMEOUT_SECONDS = ENV.number("WEBHOOK_ATTEMPT_TIMEOUT_SECONDS", 15, 0.1, 120)
WEBHOOK_ANSWER_MAX_BYTES = ENV.whole("WEBHOOK_ANSWER_MAX_BYTES", 64 * 1024, 0)
WEBHOOK_BATCH_SIZE = ENV.whole("WEBHOOK_BATCH_SIZE", 200, 1, 1000)
WEBHOOK_ENDPOINT_CONCURRENCY = ENV.whole("WEBHOOK_ENDPOINT_CONCURRENCY", 4, 1, 100)
WEBHOOK_WORKER_CAPACITY = ENV.whole("WEBHOOK_WORKER_CAPACITY", 512, 1, 4096)
WEBHOOK_CLAIM_MARGIN_SECONDS = ENV.number("WEBHOOK_CLAIM_MARGIN_SECONDS", 15, 1, 600)
WEBHOOK_SWEEP_SECONDS = ENV.number("WEBHOOK_SWEEP_SECONDS", 5, 0.2, 600)
WEBHOOK_RETENTION_DAYS = ENV.whole("WEBHOOK_RETENTION_DAYS", 30, 1)
# Keys that encrypt secrets at rest, newest first (each as `Fernet.generate_key()` makes them).
ENCRYPTION_KEYS = ENV.items("ENCRYPTION_KEYS") or [secret_from_file(VAR_DIR / "encryption_key", fernet_key)]
ENCRYPTION_KEYS_GIVEN = bool(ENV.items("ENCRYPTION_KEYS"))

# --- Celery ----------------------------------------------------------------------------------------------------------
CELERY_BROKER_URL = REDIS_URL or f"redis+socket://{BROKER_SOCKET}"
CELERY_BROKER_TRANSPORT_OPTIONS = {
    # Of the countdowns of webhook retries, 600 s at most; no other message is kept once it is fetched. One that comes
    # twice all the same changes nothing twice.
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
# A countdown is held in the worker's memory; the sweep finds what is not fetched.
CELERY_WORKER_ETA_TASK_LIMIT = 10_000
CELERY_WORKER_HIJACK_ROOT_LOGGER = False
CELERY_WORKER_SEND_TASK_EVENTS = False
CELERY_TASK_DEFAULT_QUEUE = "maintenance"
# Messages only say "look now", and sweeps find what a lost one told of. So the broker need not keep what a worker has
# fetched: that costs more than all else a message does. Countdowns are kept, for the limit above counts what is kept.
CELERY_TASK_QUEUES = [
    Queue(name, Exchange(name), routing_key=name, no_ack=name != "webhooks-retry")
    for name in ("runs", "webhooks", "webhooks-retry", "maintenance")
]
CELERY_TASK_ROUTES = {
    "runs.execute_run": {"queue": "runs"},
    "webhooks.deliver_due": {"queue": "webhooks"},
    "webhooks.retry_due": {"queue": "webhooks-retry"},
}
CELERY_BEAT_SCHEDULE_FILENAME = str(VAR_DIR / "celerybeat-schedule")
CELERY_BEAT_SCHEDULE = {
    "sweep-runs": {"task": "runs.sweep", "schedule": RUN_SWEEP_SECONDS},
    "sweep-webhooks": {"task": "webhooks.sweep", "schedule": WEBHOOK_SWEEP_SECONDS},
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
# With a bucket, files lie in an S3-compatible object storage instead of MEDIA_ROOT.
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
# Local use is plain http; production is behind TLS, so the safe values are the default wherever BASE_URL says https.
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
# Without one, nobody may scrape but with DEBUG.
METRICS_TOKEN = ENV.text("METRICS_TOKEN") or (secret_from_file(VAR_DIR / "metrics_token") if EMBEDDED else "")
# How often a process hands in what it has counted, and how long what a scrape reads is shown to further ones.
METRICS_FLUSH_SECONDS = ENV.number("METRICS_FLUSH_SECONDS", 5, 0.1, 60)
METRICS_CACHE_SECONDS = ENV.number("METRICS_CACHE_SECONDS", 5, 0, 300)
# What is read at a scrape; each app's module also declares what it counts.
METRICS_SOURCES = ["runs.metrics.gauges", "webhooks.metrics.gauges", "credits.metrics.gauges"]

# Each needs requirements-observability.txt, and is imported only if it is set.
OTEL_EXPORTER_OTLP_ENDPOINT = ENV.text("OTEL_EXPORTER_OTLP_ENDPOINT")
SENTRY_DSN = ENV.text("SENTRY_DSN")
if OTEL_EXPORTER_OTLP_ENDPOINT:
    MIDDLEWARE.insert(2, "config.telemetry.tracing.TracingMiddleware")  # behind the request's id and the probes

# --- admin (docs/admin.md) -------------------------------------------------------------------------------------------
AUTHENTICATION_BACKENDS = [
    "axes.backends.AxesStandaloneBackend",
    "django.contrib.auth.backends.ModelBackend",
    "config.staff.one_time.OneTimeBackend",
]
ADMIN_SIGN_IN_FAILURES = ENV.whole("ADMIN_SIGN_IN_FAILURES", 10, 1, 1000)
ADMIN_SIGN_IN_LOCK_SECONDS = ENV.whole("ADMIN_SIGN_IN_LOCK_SECONDS", 900, 1, 24 * 3600)
ADMIN_DASHBOARD_SECONDS = ENV.whole("ADMIN_DASHBOARD_SECONDS", 30, 0, 3600)
# By address alone: a lock by name would let anyone lock staff out.
AXES_LOCKOUT_PARAMETERS = ["ip_address"]
# The attempt at hand is counted before it is looked at.
AXES_HANDLER = "config.staff.sign_in.CountingHandler"
AXES_FAILURE_LIMIT = ADMIN_SIGN_IN_FAILURES + 1
AXES_COOLOFF_TIME = timedelta(seconds=ADMIN_SIGN_IN_LOCK_SECONDS)
AXES_RESET_COOL_OFF_ON_FAILURE_DURING_LOCKOUT = False
AXES_CLIENT_IP_CALLABLE = "config.staff.sign_in.client_ip"
AXES_LOCKOUT_CALLABLE = "config.staff.sign_in.locked"
AXES_DISABLE_ACCESS_LOG = True
AXES_ENABLE_ADMIN = False
AXES_VERBOSE = False
# By group: the label, the icon and the model of each list.
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
# A user's rows elsewhere: the label, the model, and the lookup that the user's id is given to.
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
        },
    },
}

# --- logs ------------------------------------------------------------------------------------------------------------
LOG_LEVEL = ENV.text("LOG_LEVEL", "INFO", ("DEBUG", "INFO", "WARNING", "ERROR"))
LOG_FORMAT = ENV.text("LOG_FORMAT", "text" if EMBEDDED or DEBUG else "json", ("text", "json"))
# The loggers of the servers use the same handler.
_SERVER = {"handlers": [], "propagate": True, "level": "WARNING"}
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "filters": {"context": {"()": "config.telemetry.logs.ContextFilter"}},
    "formatters": {
        "text": {"()": "config.telemetry.logs.TextFormatter", "outspoken": DEBUG},
        "json": {"()": "config.telemetry.logs.JsonFormatter", "outspoken": DEBUG},
    },
    "handlers": {
        "console": {"class": "logging.StreamHandler", "formatter": LOG_FORMAT, "filters": ["context"]},
    },
    "root": {"handlers": ["console"], "level": LOG_LEVEL},
    "loggers": {
        "django.request": {"level": "ERROR"},
        # Anyone can cause these, with a stack trace each; they are answered with 400.
        "django.security.DisallowedHost": {"level": "CRITICAL"},
        # It names whoever failed to sign in, and people type passwords into the field of the name.
        "axes": {"level": "CRITICAL"},
        **dict.fromkeys(("httpx2", "httpcore2", "openai", "anthropic"), {"level": "WARNING"}),
        "aiohttp": {"level": "ERROR"},
        "urllib3": {"level": "ERROR"},  # its warnings name the whole URL, which may hold a receiver's token
        # The SDK logs what a tool's server sent; the invocation records what staff need.
        "mcp": {"level": "CRITICAL"},
        "client": {"level": "CRITICAL"},
        **dict.fromkeys(("gunicorn.error", "uvicorn", "uvicorn.error"), _SERVER),
        **dict.fromkeys(("celery.app.trace", "celery.worker.strategy", "celery.beat"), {"level": "WARNING"}),
    },
}
