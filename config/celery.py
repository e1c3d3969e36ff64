"""The Celery application. Tasks carry ids only; the database is the truth and a message merely a nudge."""

import os

from celery import Celery
from celery.signals import setup_logging

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings")

app = Celery("config")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()


@setup_logging.connect
def keep_django_logging(**kwargs: object) -> None:
    """Workers and beat log as every other process does: by LOGGING of the settings."""
