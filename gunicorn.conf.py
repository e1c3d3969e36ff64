"""Configuration of gunicorn, which starts and stops the web processes (``config.serve.worker``).

It reads this file from the working directory. Command-line options override it.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from config import settings

proc_name = "web"  # for the log; Procfile's other process has its own
bind = f"0.0.0.0:{settings.PORT}"  # for containers; `make run` binds to loopback
workers = settings.WEB_WORKERS
threads = settings.WEB_THREADS
worker_connections = settings.WEB_CONNECTIONS_MAX
worker_class = "config.serve.worker.Worker"
# Longer than the usual idle time-out of a load balancer (60 s), because the load balancer should close the connection.
keepalive = settings.WEB_KEEPALIVE_SECONDS
graceful_timeout = settings.WEB_GRACEFUL_SECONDS
accesslog = None
loglevel = "warning"
logconfig_dict = settings.LOGGING
control_socket_disable = True
# With heartbeat files on a slow disk, gunicorn would kill healthy workers.
worker_tmp_dir = "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108
