"""The Celery application. Tasks carry ids only; the database is the truth, a message is only a nudge."""

import os
import sys

from celery import Celery
from celery.signals import beat_init, setup_logging, worker_init, worker_ready
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string
from kombu.transport.redis import Channel, QoS

from config.serve import garbage

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings")

app = Celery("config")


class SparingQoS(QoS):
    """Acknowledges only the messages that wait for it.

    Celery also acknowledges messages of ``no_ack`` queues. kombu then asks Redis to remove what is not there, and keeps
    the message's tag in memory for ever (docs/decisions/0015).
    """

    def ack(self, delivery_tag: str) -> None:
        try:
            self.get(delivery_tag)
        except KeyError:
            return
        super().ack(delivery_tag)


Channel.QoS = SparingQoS
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()


@setup_logging.connect
def keep_django_logging(**kwargs: object) -> None:
    """Workers and beat log as every other process does: by LOGGING of the settings."""


@worker_ready.connect
def leave_out_of_garbage_collections(**kwargs: object) -> None:
    garbage.spare_what_is_loaded()


@worker_init.connect
@beat_init.connect
def refuse_wrong_settings(**kwargs: object) -> None:
    """A signal's receiver may fail without ending the process, so this one ends it."""
    try:
        import_string("config.checks.require_valid_settings")()
    except ImproperlyConfigured as error:
        sys.exit(str(error))
