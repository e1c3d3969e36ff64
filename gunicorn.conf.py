"""Configuration of gunicorn, which reads this file from the working directory. Command-line options override it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from config import settings
from config.serve.web import REQUEST_LINE_MAX_BYTES

bind = f"0.0.0.0:{settings.PORT}"  # for containers; `make run` binds to loopback
workers = settings.WEB_WORKERS
threads = settings.WEB_THREADS
worker_connections = 10_000  # at this limit, gunicorn accepts no further connections; an idle one costs little
worker_class = "config.serve.web.Worker"
# Longer than the usual idle time-out of a load balancer (60 s), because the load balancer should close the connection.
keepalive = settings.WEB_KEEPALIVE_SECONDS
graceful_timeout = settings.WEB_GRACEFUL_SECONDS
limit_request_line = REQUEST_LINE_MAX_BYTES
limit_request_fields = 100
limit_request_field_size = 16 * 1024  # a session token may have 16 KiB
# A client's SCRIPT_NAME would change paths and addresses. Django reads the scheme, with TRUST_FORWARDED_PROTO.
forwarder_headers = ""
secure_scheme_headers = {}
accesslog = None
logger_class = "config.serve.web.Logger"
loglevel = "warning"
logconfig_dict = settings.LOGGING
control_socket_disable = True
# With heartbeat files on a slow disk, gunicorn would kill healthy workers.
worker_tmp_dir = "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108
