"""The Celery application. The apps define the tasks. A task's arguments are ids; all data is in the database."""

import os
from typing import Any

from celery import Celery, signals
from kombu.transport.redis import Channel, QoS

from config import checks
from config.database import retry
from config.kernel import garbage
from config.telemetry import logs

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings")

app = Celery("config")


class SparingQoS(QoS):
    """Does not acknowledge messages of ``no_ack`` queues. Celery does, and kombu then asks Redis to remove what is not
    there, and keeps the message's tag in memory for ever (docs/decisions/0002).
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
signals.setup_logging.connect(lambda **kwargs: None, weak=False)  # so that Celery keeps LOGGING of the settings
signals.before_task_publish.connect(logs.write_headers)
signals.task_prerun.connect(logs.read_headers)
signals.task_postrun.connect(logs.reset)
signals.worker_init.connect(checks.require_valid_settings)
signals.beat_init.connect(checks.require_valid_settings)  # beat has its own app, but it can be started with this one


@signals.worker_ready.connect
def finish_start(sender: Any, **kwargs: object) -> None:
    garbage.freeze_loaded_objects()
    queues = ", ".join(sorted(sender.app.amqp.queues.consume_from))
    logs.announce_ready(f"worker {sender.hostname} of {queues}")
    retry.look_for_database()
