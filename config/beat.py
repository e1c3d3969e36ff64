"""The Celery application of beat, which sends the names of the scheduled tasks. It does not load the apps, which would
be most of beat's memory.
"""

import logging.config
import os

from celery import Celery, signals
from django.conf import settings

from config import checks
from config.telemetry import logs, sentry

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings")

# Without Celery's extension for Django, which loads the apps.
app = Celery("config", fixups=[])
app.config_from_object("django.conf:settings", namespace="CELERY")


@signals.setup_logging.connect
def configure_logging(**kwargs: object) -> None:
    logging.config.dictConfig(settings.LOGGING)
    logs.capture_unlogged_output()


@signals.beat_init.connect
def prepare(**kwargs: object) -> None:
    checks.require_valid_settings()
    if settings.SENTRY_DSN:
        sentry.start()
    logs.announce_ready("beat")
