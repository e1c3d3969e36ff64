"""The entry point of the web processes (``config.serve``)."""

import os

# Imported here, so that the first request with a token and the first stream do not wait for these modules.
import jwt  # noqa: F401
import redis.asyncio  # noqa: F401
from django.core.wsgi import get_wsgi_application
from django.utils.module_loading import import_string

import config.celery  # noqa: F401  (so that the first message to a worker does not wait for it)

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings")
django = get_wsgi_application()
# It can be imported only after the apps are loaded.
application = import_string("config.serve.front.Front")(django)
