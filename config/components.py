"""The settings of packages that are the same in every installation; ``config.settings`` imports them all."""

# --- Django ----------------------------------------------------------------------------------------------------------
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
    "config.api.middleware.RequestIdMiddleware",
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
    "config.staff.sign_in.SessionAgeMiddleware",
    "axes.middleware.AxesMiddleware",
]

# --- API -------------------------------------------------------------------------------------------------------------
REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": [],
    "DEFAULT_PERMISSION_CLASSES": [],
    "DEFAULT_PARSER_CLASSES": ["config.api.negotiation.StrictJSONParser"],
    "DEFAULT_RENDERER_CLASSES": ["config.api.negotiation.ExactJSONRenderer"],
    "DEFAULT_SCHEMA_CLASS": "config.api.openapi.ServiceSchema",
    "EXCEPTION_HANDLER": "config.api.errors.exception_handler",
    "UNAUTHENTICATED_USER": None,
    "URL_FORMAT_OVERRIDE": None,
}
KEY_AUTHENTICATION = {"public": "apikeys.keys.ApiKeyAuthentication", "server": "apikeys.keys.ServerKeyAuthentication"}
CORS_URLS_REGEX = r"/(api/(public/)?v1|files|uploads)(/|$)"
CORS_ALLOW_HEADERS = [
    *("accept", "authorization", "cache-control", "content-type", "idempotency-key", "if-none-match", "if-range"),
    *("last-event-id", "mcp-method", "mcp-name", "mcp-protocol-version", "range", "traceparent", "tracestate"),
    "x-request-id",
]
CORS_EXPOSE_HEADERS = [
    *("X-Request-Id", "Retry-After", "X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset"),
    *("Idempotent-Replayed", "Link", "Location", "x-vercel-ai-ui-message-stream"),
]
SPECTACULAR_SETTINGS = {
    "TITLE": "Agent workflow service",
    "VERSION": "1.0.0",
    "LICENSE": {"name": "MIT", "identifier": "MIT"},
    "OAS_VERSION": "3.1.0",
    "SERVE_INCLUDE_SCHEMA": False,
    "SWAGGER_UI_DIST": "SIDECAR",
    # JavaScript, because JSON cannot name a preset: config/static/docs/options.js.
    "SWAGGER_UI_SETTINGS": "window.swaggerOptions()",
    "SWAGGER_UI_FAVICON_HREF": "/static/staff/favicon.svg",
    "COMPONENT_SPLIT_REQUEST": True,
    # A PATCH uses its serializer's own required fields.
    "COMPONENT_SPLIT_PATCH": False,
    "SCHEMA_PATH_PREFIX": r"/api/(public/)?v1",
    "ENUM_GENERATE_CHOICE_DESCRIPTION": False,
    "POSTPROCESSING_HOOKS": [
        "drf_spectacular.hooks.postprocess_schema_enums",
        "config.api.openapi.complete",
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
OPENAPI_PARTS = [f"{app}/openapi.yaml" for app in ("chats", "runs", "credits", "apikeys", "webhooks", "config/api")]

# --- Celery ----------------------------------------------------------------------------------------------------------
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_BROKER_CONNECTION_MAX_RETRIES = None
CELERY_TASK_IGNORE_RESULT = True
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
# A worker keeps tasks with a countdown in memory. The sweep finds the work of messages above this limit.
CELERY_WORKER_ETA_TASK_LIMIT = 10_000
CELERY_TASK_DEFAULT_QUEUE = "maintenance"
# With no_ack, the broker keeps no message that a worker has fetched, which would be most of its cost: sweeps find the
# work of a lost one. Messages with a countdown are kept, because CELERY_WORKER_ETA_TASK_LIMIT counts only those.
CELERY_TASK_QUEUES = {
    name: {"exchange": name, "routing_key": name, "no_ack": name != "webhooks-retry"}
    for name in ("runs", "webhooks", "webhooks-retry", "maintenance")
}
CELERY_TASK_ROUTES = {
    **{key: {"queue": "runs"} for key in ("runs.execute_run", "runs.resume_paid")},
    "webhooks.deliver_due": {"queue": "webhooks"},
    "webhooks.retry_due": {"queue": "webhooks-retry"},
}

# --- files and passwords ---------------------------------------------------------------------------------------------
STATIC_URL = "/static/"
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator", "OPTIONS": {"min_length": 12}},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
    {"NAME": "django.contrib.auth.password_validation.NumericPasswordValidator"},
]

# --- admin (docs/admin.md) -------------------------------------------------------------------------------------------
# By IP address only, because with a lock by username, any client could lock staff out.
AXES_LOCKOUT_PARAMETERS = ["ip_address"]
AXES_HANDLER = "config.staff.sign_in.CountingHandler"
AXES_RESET_COOL_OFF_ON_FAILURE_DURING_LOCKOUT = False
AXES_CLIENT_IP_CALLABLE = "config.staff.sign_in.client_ip"
AXES_LOCKOUT_CALLABLE = "config.staff.sign_in.locked"
AXES_DISABLE_ACCESS_LOG = True
AXES_ENABLE_ADMIN = False
# The groups of the sidebar, with label, icon and model of each list.
STAFF_NAVIGATION = {
    "Runs": [
        ("Runs", "play_circle", "runs.run"),
        ("Tool calls", "build", "runs.toolinvocation"),
        ("Waitpoints", "pause_circle", "runs.waitpoint"),
        ("Turns", "sync", "runs.turn"),
        ("Stream events", "stream", "runs.runevent"),
        ("Chats", "forum", "chats.chat"),
        ("Attachments", "attach_file", "chats.attachment"),
    ],
    "Credits": [
        ("Accounts", "account_balance_wallet", "credits.account"),
        ("Ledger", "receipt_long", "credits.ledgerentry"),
    ],
    "Webhooks": [("Endpoints", "webhook", "webhooks.endpoint"), ("Deliveries", "outbox", "webhooks.delivery")],
    "Models and tools": [
        ("Providers", "cloud", "runs.provider"),
        ("Models", "neurology", "runs.agentmodel"),
        ("Tools", "construction", "runs.tool"),
        ("Agents", "smart_toy", "runs.agent"),
    ],
    "People": [
        ("Users", "person", "auth.user"),
        ("Roles", "group", "auth.group"),
        ("API keys", "key", "apikeys.apikey"),
        ("Server keys", "vpn_key", "apikeys.serverkey"),
        ("Staff's actions", "history", "admin.logentry"),
    ],
}
# The first pages of the sidebar: label, icon, route, and permissions of which one is enough.
STAFF_PAGES = [
    ("Dashboard", "dashboard", "admin:index", ()),
    ("Reports", "bar_chart", "reports", ("credits.view_ledgerentry", "runs.view_turn")),
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
    "SIDEBAR": {"navigation": "config.staff.pages.sidebar", "show_search": True},
    # The blue of Unfold's style sheet.
    "COLORS": {
        "primary": {shade: f"var(--color-blue-{shade})" for shade in ("50", *map(str, range(100, 1000, 100)), "950")}
    },
}
