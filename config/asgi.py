"""ASGI entry point of the stream processes (``uvicorn config.asgi:application``, see the Procfile)."""

import os
from importlib import import_module

from django.conf import settings
from django.core.asgi import get_asgi_application
from django.utils.module_loading import import_string

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings")
django_application = get_asgi_application()
# It can be imported only after the apps are loaded.
import_string("config.checks.require_valid_settings")()
application = import_module(settings.STREAM_SERVERS).Application(django_application)
