"""The baseline view, without middleware, for the same server as the service, which looks for ``app``."""

import os

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings")

from django.conf import settings
from django.core.wsgi import get_wsgi_application

from config.serve.front import Front

settings.ROOT_URLCONF = "benchmarks.bare"
settings.MIDDLEWARE = []
app = Front(get_wsgi_application())
