"""gunicorn, wherever it runs: read by itself from the working directory. Command-line options win over these."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from config import settings
from config.serve.web import REQUEST_LINE_MAX_BYTES

bind = f"0.0.0.0:{settings.PORT}"  # a container's own network; `make run` binds to loopback
workers = settings.WEB_WORKERS
threads = settings.WEB_THREADS
worker_connections = 10_000  # idle ones cost little, and a full house takes nobody in
worker_class = "config.serve.web.Worker"
# Longer than a load balancer's idle time-out is common (60 s): the side that forwards should be the one that closes.
keepalive = settings.WEB_KEEPALIVE_SECONDS
graceful_timeout = settings.WEB_GRACEFUL_SECONDS
limit_request_line = REQUEST_LINE_MAX_BYTES
limit_request_fields = 100
limit_request_field_size = 16 * 1024  # a session token alone may have 16 KiB
accesslog = None
logger_class = "config.serve.web.Logger"
loglevel = "warning"
logconfig_dict = settings.LOGGING
control_socket_disable = True
# Heartbeat files on a disk that stalls would get healthy workers killed.
worker_tmp_dir = "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108
