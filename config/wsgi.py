"""WSGI entry point for the web processes."""

import os

from django.core.wsgi import get_wsgi_application
from django.utils.module_loading import import_string

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings")
application = get_wsgi_application()
# By name: it can be imported only now that the apps are loaded.
import_string("config.checks.require_valid_settings")()
