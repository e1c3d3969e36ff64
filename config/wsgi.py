"""WSGI entry point for the web processes."""

import os

import redis.asyncio  # noqa: F401  (so that the first stream does not wait for it)
from django.core.wsgi import get_wsgi_application
from django.utils.module_loading import import_string

import config.celery  # noqa: F401  (so that the first message to a worker does not wait for it)

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings")
application = get_wsgi_application()
# It can be imported only after the apps are loaded.
import_string("config.checks.require_valid_settings")()
