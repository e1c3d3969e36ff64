"""All settings. Most are read from environment variables.

The `#:` comment above a variable is its description in docs/settings.md, which `make docs` generates. Links in it are
relative to docs/.

All differences between local use and production are settings. Without ``DATABASE_URL`` and ``REDIS_URL``, the service
uses SQLite and the embedded broker, with their files in ``VAR_DIR``.
"""

import hashlib
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

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
EMBEDDED_DATABASE = not DATABASE_URL
EMBEDDED_BROKER = not REDIS_URL

# --- core ------------------------------------------------------------------------------------------------------------
#: Django's debug mode; never use it in production
DEBUG = ENV.flag("DEBUG", False)
SECRET_KEY_GIVEN = bool(ENV.text("SECRET_KEY"))
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
WSGI_APPLICATION = "config.wsgi.application"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
APPEND_SLASH = False
USE_TZ = True
TIME_ZONE = "UTC"
USE_I18N = False
FORMAT_MODULE_PATH = "config.formats"

INSTALLED_APPS = [
    "unfold",  # before the admin, whose site and templates it replaces
    "config.apps.StaffAdminConfig",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "rest_framework",
    "drf_spectacular",
    "drf_spectacular_sidecar",
    "axes",
    "config.apps.PlatformConfig",
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
#: time limit for a statement that waits for a lock; must be less than `DATABASE_ANSWER_SECONDS`
DATABASE_LOCK_SECONDS = ENV.number("DATABASE_LOCK_SECONDS", 5, 0.1, 3600)
#: time limit for the answer to a statement. Then the request is answered with 503, or the worker repeats the step on a
#: new connection. It does not apply to `manage.py`
DATABASE_ANSWER_SECONDS = ENV.number("DATABASE_ANSWER_SECONDS", 20, 1, 3600)
#: seconds after which each process reads the database's clock again; in between it adds the time of its machine
DATABASE_CLOCK_SECONDS = ENV.number("DATABASE_CLOCK_SECONDS", 30, 1, 3600)
# A command, for example a migration or a check of all rows, may take as long as it needs.
DATABASE_LIMITS_APPLY = Path(sys.argv[0]).name != "manage.py"
# PgBouncer in transaction mode does not keep a server-side cursor between statements.
#: set to 1 behind PgBouncer in transaction mode
_pgbouncer = ENV.flag("DATABASE_PGBOUNCER", False)
#: seconds for which a database connection is kept (PostgreSQL)
_connection_age = ENV.whole("DATABASE_CONN_MAX_AGE", 600)
_options: dict[str, Any] = {
    #: time limit for a new database connection (PostgreSQL)
    "connect_timeout": ENV.whole("DATABASE_CONNECT_SECONDS", 5, 2, 600),
    #: time after which a connection is closed if the database's host does not acknowledge what was sent
    "tcp_user_timeout": round(ENV.number("DATABASE_TCP_SECONDS", 15, 1, 3600) * 1000),
    "keepalives": 1,
    #: time without traffic after which a connection asks the host whether it is there
    "keepalives_idle": ENV.whole("DATABASE_KEEPALIVE_IDLE_SECONDS", 15, 1, 32767),
    #: time between two such questions
    "keepalives_interval": ENV.whole("DATABASE_KEEPALIVE_INTERVAL_SECONDS", 5, 1, 32767),
    #: questions without an answer after which the connection is closed
    "keepalives_count": ENV.whole("DATABASE_KEEPALIVE_COUNT", 3, 1, 127),
    # From its fifth execution on a connection, a statement is prepared: PostgreSQL plans it only once. This does not
    # work with PgBouncer, where each statement may reach another server process.
    "server_side_binding": True,
    "prepare_threshold": None if _pgbouncer else 5,
}
# Without this limit, the open transaction of a suspended process or a lost machine would keep its locks for hours, and
# no worker could take over its runs. PgBouncer does not forward the options: there, set them for the role.
#: PostgreSQL ends a transaction that is idle for this time, for example one of a suspended process. Behind PgBouncer,
#: set it for the role
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
#: time limit for a connection to Redis and for its answers
BROKER_TIMEOUT_SECONDS = ENV.number("BROKER_TIMEOUT_SECONDS", 2.0, 0.1, 60)
#: time limit of `/readyz`
READINESS_TIMEOUT_SECONDS = ENV.number("READINESS_TIMEOUT_SECONDS", 3.0, 0.1, 60)

# --- web server (gunicorn.conf.py) -----------------------------------------------------------------------------------
#: processes of the web server
WEB_WORKERS = ENV.whole("WEB_WORKERS", 2, 1, 256)
#: threads per process: requests that are worked on at the same time
WEB_THREADS = ENV.whole("WEB_THREADS", 16, 1, 1024)
#: how long an idle connection stays open
WEB_KEEPALIVE_SECONDS = ENV.whole("WEB_KEEPALIVE_SECONDS", 75, 0, 3600)
#: time within which a request's head must arrive, and then its body
WEB_READ_SECONDS = ENV.number("WEB_READ_SECONDS", 15, 0.1, 3600)
#: each such number of bytes of a body adds one second to the body's time
WEB_READ_BYTES_PER_SECOND = ENV.whole("WEB_READ_BYTES_PER_SECOND", 1024, 1)
#: limit of the body's time, whatever its size
WEB_BODY_SECONDS = ENV.number("WEB_BODY_SECONDS", 600, 1, 24 * 3600)
#: bytes of bodies that a process has received and not yet answered; above it, the oldest body of the address that has
#: most gets 503. Parts over 16 KiB of a body are in a temporary file
WEB_BODIES_MAX_BYTES = ENV.whole("WEB_BODIES_MAX_BYTES", 256 * 1024 * 1024, 1024 * 1024)
#: the same for one client address; above it, the address's oldest body gets 503. Behind a proxy, all clients have one
#: address unless `TRUSTED_PROXIES` is set
WEB_ADDRESS_BODIES_MAX_BYTES = ENV.whole("WEB_ADDRESS_BODIES_MAX_BYTES", 128 * 1024 * 1024, 1024 * 1024)
#: open connections per process; at this number it accepts no more until one is closed
WEB_CONNECTIONS_MAX = ENV.whole("WEB_CONNECTIONS_MAX", 10_000, 16, 60_000)
#: time for requests to finish after SIGTERM
WEB_GRACEFUL_SECONDS = ENV.whole("WEB_GRACEFUL_SECONDS", 25, 0, 3600)

# --- API -------------------------------------------------------------------------------------------------------------
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
#: larger JSON bodies are answered with 413
API_MAX_BODY_BYTES = ENV.whole("API_MAX_BODY_BYTES", 1024 * 1024, 1024)
#: deeper JSON is answered with 400
API_MAX_JSON_DEPTH = ENV.whole("API_MAX_JSON_DEPTH", 64, 4, 500)
DATA_UPLOAD_MAX_MEMORY_SIZE = None  # API_MAX_BODY_BYTES limits bodies, with the error envelope as response
#: default `limit` of lists
API_PAGE_SIZE = ENV.whole("API_PAGE_SIZE", 20, 1, 100)
#: largest `limit`
API_PAGE_SIZE_MAX = ENV.whole("API_PAGE_SIZE_MAX", 100, 1, 1000)
#: how long an `Idempotency-Key` is kept
IDEMPOTENCY_HOURS = ENV.whole("IDEMPOTENCY_HOURS", 24, 1, 24 * 30)
#: time after which an unfinished request loses its key
IDEMPOTENCY_LOCK_SECONDS = ENV.whole("IDEMPOTENCY_LOCK_SECONDS", 60, 1, 3600)
#: requests per minute and user on the session surface; 0 means no limit
RATE_LIMIT_SESSION = ENV.whole("RATE_LIMIT_SESSION", 600)
#: requests per minute and user on the public surface
RATE_LIMIT_PUBLIC = ENV.whole("RATE_LIMIT_PUBLIC", 300)
#: run starts per minute and user
RATE_LIMIT_RUN_STARTS = ENV.whole("RATE_LIMIT_RUN_STARTS", 60)
#: requests without a valid credential per minute and address
RATE_LIMIT_UNAUTHENTICATED = ENV.whole("RATE_LIMIT_UNAUTHENTICATED", 300)
#: session tokens per minute and server key
RATE_LIMIT_SERVER_KEYS = ENV.whole("RATE_LIMIT_SERVER_KEYS", 600)
#: requests for pages (admin, playground) per minute and address
RATE_LIMIT_PAGES = ENV.whole("RATE_LIMIT_PAGES", 300)
#: number of proxies in front that append to `X-Forwarded-For`
TRUSTED_PROXIES = ENV.whole("TRUSTED_PROXIES", 0, 0, 10)
# The origins of web apps that may call the API. Callers send a token and never a cookie.
#: origins of web apps that may call the API from a browser, for example `https://app.example.com`
#: ([browser apps](api.md#browser-apps))
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
    # A script, because the layout with the choice of documents and the dark mode needs a preset.
    "SWAGGER_UI_SETTINGS": """{
        layout: "StandaloneLayout",
        presets: [SwaggerUIBundle.presets.apis, SwaggerUIStandalonePreset],
        urls: [
            {name: "Session surface: /api/v1, session tokens", url: "/api/schema/session?format=json"},
            {name: "Public surface: /api/public/v1, API keys", url: "/api/schema/public?format=json"},
            {name: "Both surfaces", url: "/api/schema?format=json"},
        ],
        defaultModelsExpandDepth: 0,
        persistAuthorization: false,
    }""",
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
#: the OIDC provider's issuer; if empty, the service issues its own tokens
SESSION_ISSUER = ENV.text("SESSION_ISSUER")
#: the expected `aud`
SESSION_AUDIENCE = ENV.text("SESSION_AUDIENCE")
#: address of the provider's keys
SESSION_JWKS_URL = ENV.text("SESSION_JWKS_URL")
#: accepted clock difference in tokens
SESSION_LEEWAY_SECONDS = ENV.whole("SESSION_LEEWAY_SECONDS", 30, 0, 600)
#: time limit for fetching keys. As long as a process has none, requests wait for its first attempt only and get 503
#: afterwards
SESSION_JWKS_TIMEOUT_SECONDS = ENV.number("SESSION_JWKS_TIMEOUT_SECONDS", 3.0, 0.1, 30)
#: minimum time between two fetches for unknown keys
SESSION_JWKS_REFETCH_SECONDS = ENV.whole("SESSION_JWKS_REFETCH_SECONDS", 60, 1)
#: how long fetched keys are used before they are fetched again
SESSION_JWKS_CACHE_SECONDS = ENV.whole("SESSION_JWKS_CACHE_SECONDS", 3600, 1)
# Signs the session tokens of the local issuer.
SESSION_KEY = "" if SESSION_ISSUER else secret_from_file(VAR_DIR / "session_key.pem", signing_key)

# --- API keys --------------------------------------------------------------------------------------------------------
#: live API keys per user
API_KEY_MAX_LIVE = ENV.whole("API_KEY_MAX_LIVE", 50, 1)
#: default `expirationDays`
API_KEY_DEFAULT_DAYS = ENV.whole("API_KEY_DEFAULT_DAYS", 90, 1, 365)
API_KEY_MAX_DAYS = 365
#: minimum time between two writes of `lastUsedAt`
API_KEY_LAST_USED_SECONDS = ENV.whole("API_KEY_LAST_USED_SECONDS", 60, 1)

# --- credits ---------------------------------------------------------------------------------------------------------
#: credits granted to each new user
SIGNUP_CREDITS = ENV.text("SIGNUP_CREDITS", "100")
# (user id, chat ids) → {chat id: title}, for the reports of credits, which may not import chats.
CREDITS_CHAT_TITLES = "chats.services.titles_of"
# (ids of tool calls) → {id: when the user approved it}, for the ledger in the admin.
CREDITS_APPROVALS = "runs.admin.journal.approved_at"
#: interval at which expired grants are taken back
CREDIT_EXPIRY_SWEEP_SECONDS = ENV.number("CREDIT_EXPIRY_SWEEP_SECONDS", 60, 1, 24 * 3600)

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
# Also the validity of an upload URL. S3 signs URLs for at most one week.
#: time in which an attachment must be uploaded and completed
ATTACHMENT_EXPIRY_SECONDS = ENV.whole("ATTACHMENT_EXPIRY_SECONDS", 24 * 3600, 60, 7 * 24 * 3600)
#: interval at which expired attachments are removed
ATTACHMENT_SWEEP_SECONDS = ENV.number("ATTACHMENT_SWEEP_SECONDS", 300, 1, 24 * 3600)
#: time after which a deleted chat is purged with its messages, files and runs; the ledger stays
CHAT_RETENTION_DAYS = ENV.whole("CHAT_RETENTION_DAYS", 30, 0, 36500)
#: time after which an attachment that no message uses is removed
ATTACHMENT_UNUSED_DAYS = ENV.whole("ATTACHMENT_UNUSED_DAYS", 30, 1, 36500)
#: attachments per message
ATTACHMENTS_PER_MESSAGE_MAX = ENV.whole("ATTACHMENTS_PER_MESSAGE_MAX", 10, 1, 1000)
# Uploads and downloads in a process at the same time. Each occupies a thread for as long as its client needs.
#: uploads and downloads of one user that a web process handles at the same time; one more is 429
ATTACHMENT_TRANSFERS_PER_USER = ENV.whole("ATTACHMENT_TRANSFERS_PER_USER", 10, 1, 1000)

# --- runs ------------------------------------------------------------------------------------------------------------
#: default `creditApprovalThreshold` of runs
CREDIT_APPROVAL_THRESHOLD = ENV.text("CREDIT_APPROVAL_THRESHOLD", "10")
#: running runs per user; more runs are queued in order; 0 means no limit
RUN_USER_LIMIT = ENV.whole("RUN_USER_LIMIT", 20)
#: most earlier runs of the chat that the model receives
RUN_HISTORY_RUNS = ENV.whole("RUN_HISTORY_RUNS", 50, 0, 1000)
#: the model that summarises the earlier runs of a chat that outgrows its model; if empty or if it fails, the run's own
RUN_SUMMARY_MODEL = ENV.text("RUN_SUMMARY_MODEL")
#: tokens of such a summary; never more than an eighth of the model's window
RUN_SUMMARY_MAX_TOKENS = ENV.whole("RUN_SUMMARY_MAX_TOKENS", 2048, 64, 100_000)
#: runs that are queued behind the active run of a chat
RUN_QUEUE_MAX = ENV.whole("RUN_QUEUE_MAX", 100, 1)
# How many runs a filtered page examines before it ends, also if it is not full.
#: runs that a page of a filtered list examines before it ends, also if it is not full
RUN_SEARCH_ENTRIES = ENV.whole("RUN_SEARCH_ENTRIES", 1000, 100, 1_000_000)
#: turns per run
RUN_TURN_LIMIT = ENV.whole("RUN_TURN_LIMIT", 50, 1)
#: tool calls per run
RUN_CALLS_MAX = ENV.whole("RUN_CALLS_MAX", 1000, 1)
#: running time per run
RUN_TIMEOUT_SECONDS = ENV.number("RUN_TIMEOUT_SECONDS", 1800, 1)
#: how long a run waits for an answer
WAITPOINT_EXPIRY_SECONDS = ENV.number("WAITPOINT_EXPIRY_SECONDS", 24 * 3600, 1)

# --- tools -----------------------------------------------------------------------------------------------------------
#: time limit of a tool call, if the tool has none of its own
TOOL_TIMEOUT_SECONDS = ENV.number("TOOL_TIMEOUT_SECONDS", 60, 0.1, 3600)
# Staff test a model, try a tool or import a server's tools. In the admin, a thread of a web process waits.
#: time limit of what staff wait for: *Test* of a model, *Try it* of a tool, the list of tools for an import
STAFF_REQUEST_SECONDS = ENV.number("STAFF_REQUEST_SECONDS", 20, 0.1, 300)
#: tools of one MCP server that can be imported; a server with more is refused
TOOL_IMPORT_MAX = ENV.whole("TOOL_IMPORT_MAX", 500, 1, 10_000)
#: characters of a result; a longer result is cut
TOOL_RESULT_MAX_CHARS = ENV.whole("TOOL_RESULT_MAX_CHARS", 100_000, 100)
#: number of a call's `resultUrls`
TOOL_RESULT_URLS_MAX = ENV.whole("TOOL_RESULT_URLS_MAX", 50, 1, 1000)
#: characters of a call's input
TOOL_INPUT_MAX_CHARS = ENV.whole("TOOL_INPUT_MAX_CHARS", 200_000, 100)
# Of a compiled pattern of a tool's schema: the time of a match grows with it and with the length of the text.
#: memory of a compiled `pattern` of a tool's input schema; a larger one is refused when the tool is saved
TOOL_PATTERN_MAX_BYTES = ENV.whole("TOOL_PATTERN_MAX_BYTES", 64 * 1024, 1024, 10 * 1024 * 1024)
#: time of a processor for the check of one input against its tool's schema; an input that needs more is `INVALID_INPUT`
TOOL_CHECK_SECONDS = ENV.number("TOOL_CHECK_SECONDS", 0.5, 0.05, 60)
#: size limit of the answer of an `http` tool and of a fetched page
TOOL_ANSWER_MAX_BYTES = ENV.whole("TOOL_ANSWER_MAX_BYTES", 1024 * 1024, 1024)
#: calls per turn
TOOL_CALLS_PER_TURN_MAX = ENV.whole("TOOL_CALLS_PER_TURN_MAX", 64, 1)
# One user's share of a worker process: calls at work, threads that compute, threads that read and write files, and
# bytes of attachments in requests to models. What exceeds the share waits and delays no other user.
#: tool calls of one user at work in a worker process; further ones wait, and the wait costs them none of their time
TOOL_CALLS_PER_USER = ENV.whole("TOOL_CALLS_PER_USER", 32, 1, 100_000)
#: how many of `RUN_WORKER_TOOL_THREADS` one user can occupy
TOOL_THREADS_PER_USER = ENV.whole("TOOL_THREADS_PER_USER", 1, 1, 1024)
#: how many of `RUN_WORKER_FILE_THREADS` one user can occupy
FILE_THREADS_PER_USER = ENV.whole("FILE_THREADS_PER_USER", 2, 1, 1024)
#: time in which the files of one turn must be read
ATTACHMENT_READ_SECONDS = ENV.number("ATTACHMENT_READ_SECONDS", 60, 0.1, 3600)
#: bytes of one user's files in requests to models that a worker process holds at a time; further turns wait
ATTACHMENT_BYTES_PER_USER = ENV.whole("ATTACHMENT_BYTES_PER_USER", 128 * 1024 * 1024, 1)

# --- requests to models ----------------------------------------------------------------------------------------------
MESSAGE_MAX_CHARS = 100_000
#: characters of a run's `instructions`
RUN_INSTRUCTIONS_MAX_CHARS = ENV.whole("RUN_INSTRUCTIONS_MAX_CHARS", 20_000, 1, 1_000_000)
# Whether requests with an API key may give a run instructions.
#: `0`: requests with an API key may not have `instructions`, 400
RUN_INSTRUCTIONS_PUBLIC = ENV.flag("RUN_INSTRUCTIONS_PUBLIC", True)
#: characters of an agent's instructions
AGENT_INSTRUCTIONS_MAX_CHARS = ENV.whole("AGENT_INSTRUCTIONS_MAX_CHARS", 100_000, 1, 10_000_000)
#: size of an `outputSchema`
OUTPUT_SCHEMA_MAX_BYTES = ENV.whole("OUTPUT_SCHEMA_MAX_BYTES", 16 * 1024, 2, 1024 * 1024)
#: objects and lists within each other in an `outputSchema`
OUTPUT_SCHEMA_MAX_DEPTH = ENV.whole("OUTPUT_SCHEMA_MAX_DEPTH", 16, 1, 64)
#: answers of the model that may not fit an `outputSchema`; then the run fails with `OUTPUT_INVALID`
OUTPUT_ATTEMPTS = ENV.whole("OUTPUT_ATTEMPTS", 3, 1, 100)
#: time limit of a turn
MODEL_TIMEOUT_SECONDS = ENV.number("MODEL_TIMEOUT_SECONDS", 600, 0.1, 7200)
#: longest time within a turn in which the model sends nothing
MODEL_STALL_SECONDS = ENV.number("MODEL_STALL_SECONDS", 120, 0.1, 7200)
# How often a turn asks one model. It waits in between: up to MODEL_RETRY_SECONDS · 2ⁿ, or what the provider asks for.
#: how often a turn asks one model, before its fallbacks
MODEL_ATTEMPTS = ENV.whole("MODEL_ATTEMPTS", 5, 1, 100)
#: longest wait after the first failed request; it doubles with each further one
MODEL_RETRY_SECONDS = ENV.number("MODEL_RETRY_SECONDS", 0.5, 0, 60)
#: longest wait between two requests, also if the provider asks for more
MODEL_RETRY_AFTER_MAX_SECONDS = ENV.number("MODEL_RETRY_AFTER_MAX_SECONDS", 60, 0, 3600)
# Limits of a provider (docs/models.md). A lost worker's places are free after the lease; a worker with waiting requests
# asks for places in this interval.
#: after this time, a lost worker's places at providers with limits are free
MODEL_PLACES_LEASE_SECONDS = ENV.number("MODEL_PLACES_LEASE_SECONDS", 20, 1, 600)
#: how often a worker with waiting runs asks for places at providers with limits
MODEL_PLACES_POLL_SECONDS = ENV.number("MODEL_PLACES_POLL_SECONDS", 0.1, 0.01, 10)
#: characters per turn; a longer answer is a `MODEL_ERROR`
MODEL_OUTPUT_MAX_CHARS = ENV.whole("MODEL_OUTPUT_MAX_CHARS", 1_000_000, 1000)
#: bytes of one event in the answer of a provider; a longer one is a `MODEL_ERROR`
MODEL_EVENT_MAX_BYTES = ENV.whole("MODEL_EVENT_MAX_BYTES", 2 * 1024 * 1024, 64 * 1024)

# --- run workers -----------------------------------------------------------------------------------------------------
#: time after which other workers take over the runs of a worker that sends no heartbeat
RUN_LEASE_SECONDS = ENV.number("RUN_LEASE_SECONDS", 10, 0.5, 600)
#: number of lost workers after which a run fails with `WORKER_LOST`
RUN_LEASE_LOSSES_MAX = ENV.whole("RUN_LEASE_LOSSES_MAX", 5, 1)
#: runs that one worker process executes at a time
RUN_WORKER_CAPACITY = ENV.whole("RUN_WORKER_CAPACITY", 2000, 1)
#: database threads of a worker process, one connection each (the heartbeat has one more)
RUN_WORKER_DB_THREADS = ENV.whole("RUN_WORKER_DB_THREADS", 8, 1, 64)
#: database threads of a worker process that the runs of one user may occupy (default: half of them); further steps wait
#: in order
RUN_WORKER_DB_THREADS_PER_USER = ENV.whole("RUN_WORKER_DB_THREADS_PER_USER", max(1, RUN_WORKER_DB_THREADS // 2), 1, 64)
#: threads of a worker process that compute for tools; calls to servers need none
RUN_WORKER_TOOL_THREADS = ENV.whole("RUN_WORKER_TOOL_THREADS", 4, 1, 1024)
#: threads of a worker process that read attachments and store the files of tools
RUN_WORKER_FILE_THREADS = ENV.whole("RUN_WORKER_FILE_THREADS", 16, 1, 1024)
#: time for steps to finish after SIGTERM, before the worker hands its runs over
RUN_SHUTDOWN_GRACE_SECONDS = ENV.number("RUN_SHUTDOWN_GRACE_SECONDS", 15, 0, 600)
#: interval at which workers look for runs whose message was lost and for waitpoints after their time; for lost workers
#: they look at this interval or in a fifth of `RUN_LEASE_SECONDS`, whichever is shorter
RUN_SWEEP_SECONDS = ENV.number("RUN_SWEEP_SECONDS", 2, 0.2, 600)
#: interval at which a worker looks for cancellation requests; at most a fifth of `RUN_LEASE_SECONDS`
RUN_CANCEL_POLL_SECONDS = ENV.number("RUN_CANCEL_POLL_SECONDS", 0.2, 0.05, 10)
#: minimum time between two writes of streamed text; the first text of a turn does not wait for it
STREAM_FLUSH_SECONDS = ENV.number("STREAM_FLUSH_SECONDS", 0.05, 0.01, 5)

# --- streams ---------------------------------------------------------------------------------------------------------
# Streams (docs/streams.md). STREAMS_PER_USER holds for all processes together, the other limits for each process.
#: open streams per user, in all processes together; one more is 429
STREAMS_PER_USER = ENV.whole("STREAMS_PER_USER", 50, 1, 100_000)
#: interval of the comment lines that keep a silent stream open
STREAM_HEARTBEAT_SECONDS = ENV.number("STREAM_HEARTBEAT_SECONDS", 15, 0.1, 600)
#: open streams per process
STREAM_CONNECTIONS_MAX = ENV.whole("STREAM_CONNECTIONS_MAX", 5000, 1)
#: time after which a client that reads nothing of a stream or another answer is disconnected
STREAM_STALL_SECONDS = ENV.number("STREAM_STALL_SECONDS", 30, 0.1, 600)
#: interval at which the credential of an open stream is checked again
STREAM_AUTH_SECONDS = ENV.number("STREAM_AUTH_SECONDS", 10, 0.1, 30)
# The intervals of the query for all streams of a process: with Redis, because a wake-up may be lost, and without Redis.
#: interval at which runs with open streams are read from the database, in addition to wake-ups
STREAM_CHECK_SECONDS = ENV.number("STREAM_CHECK_SECONDS", 2, 0.05, 60)
#: the same interval while Redis sends no wake-ups
STREAM_POLL_SECONDS = ENV.number("STREAM_POLL_SECONDS", 0.2, 0.02, 10)
#: database threads that read events
STREAM_DB_THREADS = ENV.whole("STREAM_DB_THREADS", 2, 1, 64)
#: how long the stream events of finished runs are kept at least; on PostgreSQL up to two weeks longer
RUN_EVENT_RETENTION_DAYS = ENV.whole("RUN_EVENT_RETENTION_DAYS", 30, 1)

# --- MCP and playground ----------------------------------------------------------------------------------------------
# MCP (docs/mcp.md): the web origins that may send requests, and the calls that may wait for a run at the same time, per
# user and per process.
#: other web origins whose pages may call `/api/mcp`
MCP_ALLOWED_ORIGINS = ENV.items("MCP_ALLOWED_ORIGINS")
#: messages of a JSON-RPC batch; a larger batch is refused
MCP_BATCH_MAX = ENV.whole("MCP_BATCH_MAX", 20, 1, 1000)
#: MCP calls of one user that may wait for a run at the same time, in all processes together; one more is 429
MCP_WAITS_PER_USER = ENV.whole("MCP_WAITS_PER_USER", 4, 1, 10_000)
#: MCP calls of one process that may wait for a run at the same time; each holds a web thread
MCP_WAITS_MAX = ENV.whole("MCP_WAITS_MAX", 8, 0, 10_000)
#: serve `/playground` (default: on in the embedded default and with `DEBUG`)
PLAYGROUND = ENV.flag("PLAYGROUND", EMBEDDED or DEBUG)
#: show the playground only to staff who are signed in to the admin (default: off in the embedded default and with
#: `DEBUG`, otherwise on)
PLAYGROUND_STAFF_ONLY = ENV.flag("PLAYGROUND_STAFF_ONLY", not (EMBEDDED or DEBUG))
#: only for fault tests: the point at which a worker kills itself
RUN_CRASH_POINT = ENV.text("RUN_CRASH_POINT")

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
#: the most tokens that a provider counts for one image; credits are held for them
MODEL_IMAGE_TOKENS_MAX = ENV.whole("MODEL_IMAGE_TOKENS_MAX", 16_384, 0)
#: output tokens per turn
MODEL_MAX_OUTPUT_TOKENS = ENV.whole("MODEL_MAX_OUTPUT_TOKENS", 8192, 1)
# A release and make run apply this file; without it, the file in the project's root, if there is one.
_catalogue = BASE_DIR / "catalogue.yaml"
#: the [catalogue file](catalogue.md) that a release and `make run` apply; if empty, `catalogue.yaml` in the project's
#: root, if there is one
CATALOGUE_FILE = ENV.text("CATALOGUE_FILE") or (str(_catalogue) if _catalogue.exists() else "")
#: size of a catalogue file
CATALOGUE_MAX_BYTES = ENV.whole("CATALOGUE_MAX_BYTES", 1024 * 1024, 1024, 64 * 1024 * 1024)
#: the system prompt of every turn
MODEL_SYSTEM_PROMPT = ENV.text("MODEL_SYSTEM_PROMPT", "You are a helpful assistant. Use the tools when they help.")

# Limits of the attachments in one request to a model. The newest are sent first. The request names the omitted ones.
#: characters of text files that the model receives in one turn
MODEL_ATTACHMENT_TEXT_MAX_CHARS = ENV.whole("MODEL_ATTACHMENT_TEXT_MAX_CHARS", 200_000)
#: bytes of files that the model receives in one turn
MODEL_ATTACHMENT_MAX_BYTES = ENV.whole("MODEL_ATTACHMENT_MAX_BYTES", 20 * 1024 * 1024)

# --- outbound requests: webhooks and tools ----------------------------------------------------------------------------
#: allow http and private addresses, for webhooks and tools (default: on only in the embedded default)
OUTBOUND_ALLOW_PRIVATE = ENV.flag(ENV.moved("WEBHOOK_ALLOW_PRIVATE", "OUTBOUND_ALLOW_PRIVATE"), EMBEDDED)
#: time limit for connecting to a receiver or a tool
OUTBOUND_CONNECT_TIMEOUT_SECONDS = ENV.number(
    ENV.moved("WEBHOOK_CONNECT_TIMEOUT_SECONDS", "OUTBOUND_CONNECT_TIMEOUT_SECONDS"), 5, 0.1, 60
)
#: host names that a process looks up at the same time, for webhooks and tools
OUTBOUND_LOOKUPS_MAX = ENV.whole(ENV.moved("WEBHOOK_LOOKUPS_MAX", "OUTBOUND_LOOKUPS_MAX"), 256, 1, 4096)
#: how many of them may be looked up for the tools of one user; further ones fail
OUTBOUND_LOOKUPS_PER_USER = ENV.whole("OUTBOUND_LOOKUPS_PER_USER", 64, 1, 4096)

# --- webhooks --------------------------------------------------------------------------------------------------------
#: how long the previous secret stays valid after a rotation
WEBHOOK_GRACE_SECONDS = ENV.whole("WEBHOOK_GRACE_SECONDS", 24 * 3600, 0)
#: time limit of an attempt
WEBHOOK_ATTEMPT_TIMEOUT_SECONDS = ENV.number("WEBHOOK_ATTEMPT_TIMEOUT_SECONDS", 15, 0.1, 120)
#: bytes of a receiver's answer that are read
WEBHOOK_ANSWER_MAX_BYTES = ENV.whole("WEBHOOK_ANSWER_MAX_BYTES", 64 * 1024, 0)
#: deliveries that are claimed at a time
WEBHOOK_BATCH_SIZE = ENV.whole("WEBHOOK_BATCH_SIZE", 200, 1, 1000)
#: concurrent attempts per endpoint
WEBHOOK_ENDPOINT_CONCURRENCY = ENV.whole("WEBHOOK_ENDPOINT_CONCURRENCY", 4, 1, 100)
#: concurrent attempts to the installation endpoint
WEBHOOK_INSTALLATION_CONCURRENCY = ENV.whole("WEBHOOK_INSTALLATION_CONCURRENCY", 32, 1, 1000)
#: concurrent attempts per process
WEBHOOK_WORKER_CAPACITY = ENV.whole("WEBHOOK_WORKER_CAPACITY", 512, 1, 4096)
#: added to an attempt's time limit to get the time at which its claim ends
WEBHOOK_CLAIM_MARGIN_SECONDS = ENV.number("WEBHOOK_CLAIM_MARGIN_SECONDS", 15, 1, 600)
#: interval at which the service looks for due deliveries
WEBHOOK_SWEEP_SECONDS = ENV.number("WEBHOOK_SWEEP_SECONDS", 5, 0.2, 600)
#: pending deliveries per endpoint; the oldest of more are dropped
WEBHOOK_PENDING_MAX = ENV.whole("WEBHOOK_PENDING_MAX", 10_000, 1)
#: pending deliveries to the installation endpoint; the oldest of more are dropped
WEBHOOK_INSTALLATION_PENDING_MAX = ENV.whole("WEBHOOK_INSTALLATION_PENDING_MAX", 200_000, 1)
#: how long finished deliveries are kept
WEBHOOK_RETENTION_DAYS = ENV.whole("WEBHOOK_RETENTION_DAYS", 30, 1)
# ``erase_user`` waits so long for the runs that it cancelled, and then for tools that may still be storing a file.
#: how long `erase_user` waits for runs and rows that are in use
ERASE_WAIT_SECONDS = ENV.number("ERASE_WAIT_SECONDS", 60, 1, 3600)
#: how long after the end of a failed or cancelled tool call `erase_user` waits for the call's files
ERASE_SETTLE_SECONDS = ENV.number("ERASE_SETTLE_SECONDS", 10, 0, 600)
#: Fernet keys for stored secrets, newest first; generated under `VAR_DIR` if empty
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
CELERY_TASK_QUEUES = {
    name: {"exchange": name, "routing_key": name, "no_ack": name != "webhooks-retry"}
    for name in ("runs", "webhooks", "webhooks-retry", "maintenance")
}
CELERY_TASK_ROUTES = {
    "runs.execute_run": {"queue": "runs"},
    "webhooks.deliver_due": {"queue": "webhooks"},
    "webhooks.retry_due": {"queue": "webhooks-retry"},
}
#: a process does not try again for this time to process a row that failed in a [housekeeping
#: job](operations.md#housekeeping)
HOUSEKEEPING_RETRY_SECONDS = ENV.number("HOUSEKEEPING_RETRY_SECONDS", 60, 0, 86400)
#: time for which a housekeeping job waits for a row or a table that another transaction has locked (PostgreSQL)
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
#: time limit of each request to the bucket
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
#: redirect http to https (default: on if `BASE_URL` starts with https)
SECURE_SSL_REDIRECT = ENV.flag("SECURE_SSL_REDIRECT", _https)
#: trust `X-Forwarded-Proto`; set it only if a proxy sets that header
SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https") if ENV.flag("TRUST_FORWARDED_PROTO", False) else None
#: HSTS (default: one year if `BASE_URL` starts with https)
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
#: bearer token that `/metrics` requires. If empty, nobody may scrape (embedded default: generated under `VAR_DIR`)
METRICS_TOKEN = ENV.text("METRICS_TOKEN") or (secret_from_file(VAR_DIR / "metrics_token") if EMBEDDED else "")
#: interval at which a process sends its counts to Redis
METRICS_FLUSH_SECONDS = ENV.number("METRICS_FLUSH_SECONDS", 5, 0.1, 60)
#: how long the values that one scrape has read are reused for other scrapes
METRICS_CACHE_SECONDS = ENV.number("METRICS_CACHE_SECONDS", 5, 0, 300)
# Functions that return gauges for each scrape. These modules also declare the metrics of their apps.
METRICS_SOURCES = ["runs.metrics.gauges", "webhooks.metrics.gauges", "credits.metrics.gauges"]

# Both need the packages of requirements-observability.txt, which are imported only if the setting is set.
#: where traces are sent, over OTLP/HTTP; needs `requirements-observability.txt`
OTEL_EXPORTER_OTLP_ENDPOINT = ENV.text("OTEL_EXPORTER_OTLP_ENDPOINT")
#: a trace's address in your tracing backend, with `{trace}` for its id; a run's page in the admin then links to it
TRACE_URL = ENV.text("TRACE_URL")
#: where exceptions are reported; needs `requirements-observability.txt`
SENTRY_DSN = ENV.text("SENTRY_DSN")
if OTEL_EXPORTER_OTLP_ENDPOINT:
    MIDDLEWARE.insert(3, "config.telemetry.tracing.TracingMiddleware")  # after the request's id and the probes

# --- admin (docs/admin.md) -------------------------------------------------------------------------------------------
AUTHENTICATION_BACKENDS = [
    "axes.backends.AxesStandaloneBackend",
    "django.contrib.auth.backends.ModelBackend",
    "config.staff.one_time.OneTimeBackend",
]
#: number of wrong passwords after which an address is locked
ADMIN_SIGN_IN_FAILURES = ENV.whole("ADMIN_SIGN_IN_FAILURES", 10, 1, 1000)
#: duration of that lock
ADMIN_SIGN_IN_LOCK_SECONDS = ENV.whole("ADMIN_SIGN_IN_LOCK_SECONDS", 900, 1, 24 * 3600)
#: hours after the sign-in at which a session of staff ends
ADMIN_SESSION_HOURS = ENV.whole("ADMIN_SESSION_HOURS", 12, 1, 24 * 14)
#: minutes without a request after which a session of staff ends
ADMIN_SESSION_IDLE_MINUTES = ENV.whole("ADMIN_SESSION_IDLE_MINUTES", 60, 1, 24 * 60)
# Only staff have sessions. Each request to a page renews the idle time.
SESSION_COOKIE_AGE = ADMIN_SESSION_IDLE_MINUTES * 60
SESSION_SAVE_EVERY_REQUEST = True
#: how long a process reuses the dashboard's numbers before it reads them again
ADMIN_DASHBOARD_SECONDS = ENV.whole("ADMIN_DASHBOARD_SECONDS", 30, 0, 3600)
#: PostgreSQL ends a query of the dashboard after this time; its panel then says so, and the others are shown
ADMIN_PANEL_SECONDS = ENV.number("ADMIN_PANEL_SECONDS", 5, 0.1, 300)
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
    (
        "Catalogue",
        [
            ("Models", "neurology", "runs.agentmodel"),
            ("Agents", "smart_toy", "runs.agent"),
            ("Providers", "cloud", "runs.provider"),
            ("Tools", "construction", "runs.tool"),
        ],
    ),
    (
        "People",
        [
            ("Users", "person", "auth.user"),
            ("Roles", "group", "auth.group"),
            ("API keys", "key", "apikeys.apikey"),
            ("Server keys", "vpn_key", "apikeys.serverkey"),
            ("Staff's actions", "history", "admin.logentry"),
        ],
    ),
]
# Pages below the dashboard in the sidebar: label, icon, route, and permissions of which one is enough.
STAFF_PAGES = [("Reports", "bar_chart", "admin:runs_reports", ("credits.view_ledgerentry", "runs.view_turn"))]
# The page of a user: template, and (request, user) → context.
STAFF_PERSON_PAGE = ("admin/runs/person.html", "runs.admin.person.show")
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
    "SCRIPTS": [STATIC_URL + "staff/staff.js"],
    "DASHBOARD_CALLBACK": "runs.admin.dashboard.show",
    "SIDEBAR": {"navigation": "config.staff.navigation.sidebar", "show_search": True},
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
#: `DEBUG`, `INFO`, `WARNING` or `ERROR`
LOG_LEVEL = ENV.text("LOG_LEVEL", "INFO", ("DEBUG", "INFO", "WARNING", "ERROR"))
#: `json` or `text` (default: text in the embedded default, with `make run` and with `DEBUG`)
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
