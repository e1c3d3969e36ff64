"""Application of the baseline view, without middleware, for the same server as the service."""

import os

from django.conf import settings
from django.core.wsgi import get_wsgi_application

from config.serve.front import Front

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings")
settings.ROOT_URLCONF = "benchmarks.bare"
settings.MIDDLEWARE = []
application = Front(get_wsgi_application())
