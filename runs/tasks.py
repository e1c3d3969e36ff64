"""The Celery tasks of runs. A message is a nudge: it carries ids, and may be lost or come twice."""

import logging
from typing import Any

from celery import shared_task
from celery.exceptions import ImproperlyConfigured
from celery.signals import celeryd_after_setup, worker_shutdown, worker_shutting_down
from django.conf import settings

from config.queue import publisher
from config.telemetry import logs
from runs import lifecycle
from runs.apps import RESUME_PAID

logger = logging.getLogger(__name__)

engine: Any = None  # the Engine of a run worker


@shared_task(name=lifecycle.EXECUTE)
def execute_run(*run_ids: str) -> None:
    """Offer the runs to this process's engine."""
    if len(run_ids) > 1:
        logs.request_id.set(logs.NONE)  # the message has the request id of the first run; each run has its own
    for run_id in run_ids:
        logs.run_id.set(run_id)
        if engine is None:
            logger.error("run %s reached a worker without an engine; the sweep will find it", run_id)
        else:
            engine.offer(run_id)


@shared_task(name=RESUME_PAID)
def resume_paid(*user_ids: str) -> None:
    """Resume the runs of these users that wait for credits."""
    for user_id in user_ids:
        lifecycle.resume_paid(int(user_id))


@celeryd_after_setup.connect
def start_engine(sender: str, instance, conf, **kwargs) -> None:
    """Start the engine of a run worker, before its first message and without waiting for the broker."""
    global engine
    if "runs" not in instance.app.amqp.queues.consume_from:
        return
    if not instance.pool_cls.__module__.endswith((".thread", ".solo")):
        raise ImproperlyConfigured("a run worker executes its runs in one process: start it with --pool threads")
    # Imported here, because other workers do not need the engine with its models and tools.
    from runs.engine.engine import Engine

    engine = Engine()
    engine.start()


@worker_shutting_down.connect
def drain_engine(**kwargs) -> None:
    if engine is not None:
        engine.drain()


@worker_shutdown.connect
def stop_engine(**kwargs) -> None:
    if engine is not None:
        engine.stop(settings.RUN_SHUTDOWN_GRACE_SECONDS)
        # While the connections to the broker are still open, so that other workers take the runs that were handed over.
        publisher.flush()
