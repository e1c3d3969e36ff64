"""OpenTelemetry traces: a request, the task that it starts, and the model and tool calls of the run. A span has only
ids, names and statuses, no user content. Without OTEL_EXPORTER_OTLP_ENDPOINT, ``span`` does nothing.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Modules of OpenTelemetry. ``start`` imports them: without traces, they would only cost memory.
trace: Any = None
propagate: Any = None
_tracer: Any = None
# The open spans of the tasks that this process executes, by task id.
_tasks: dict[str, Any] = {}


def start() -> None:
    """Send spans from now on, on a background thread. The SDK reads its configuration from the OTEL_ variables."""
    global trace, propagate, _tracer
    from celery import signals
    from opentelemetry import propagate, trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    if "service.name=" not in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
        os.environ.setdefault("OTEL_SERVICE_NAME", "agent-workflow-service")
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    _tracer = trace.get_tracer("service")
    signals.before_task_publish.connect(_write_headers, dispatch_uid="config.telemetry.tracing")
    signals.task_prerun.connect(_begin_task, dispatch_uid="config.telemetry.tracing")
    signals.task_postrun.connect(_end_task, dispatch_uid="config.telemetry.tracing")


@contextmanager
def span(name: str, *, kind: str = "INTERNAL", parent: Any = None, **attributes: str) -> Iterator[Any]:
    """A span around the block, within the current span or ``parent``. It has types of exceptions, not their texts."""
    if _tracer is None:
        yield None
        return
    options = {"kind": trace.SpanKind[kind], "record_exception": False, "set_status_on_exception": False}
    with _tracer.start_as_current_span(name, context=parent, attributes=attributes, **options) as current:
        try:
            yield current
        except BaseException as error:
            set_failed(current, type(error).__name__)
            raise


def set_failed(current: Any, reason: str) -> None:
    """Give a span of ``span`` the error status. ``reason`` is a code or the name of a type."""
    if current is not None:
        current.set_status(trace.Status(trace.StatusCode.ERROR, reason))


def current() -> str | None:
    """The W3C ``traceparent`` of the current span, or None."""
    if _tracer is None:
        return None
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return carrier.get("traceparent")


def parent_of(carrier: Any) -> Any:
    """The ``parent`` for ``span`` that ``carrier.get`` names. None without ``traceparent``, or in a current span."""
    if _tracer is None or carrier.get("traceparent") is None or current() is not None:
        return None
    return propagate.extract(carrier)


def _write_headers(headers: dict[str, Any], **kwargs: Any) -> None:
    propagate.inject(headers)


def _begin_task(task_id: str, task: Any, **kwargs: Any) -> None:
    """Open a span for a task that a request started. Scheduled tasks get no span: there are too many of them."""
    if (parent := parent_of(task.request)) is not None:
        task_span = span(f"task {task.name}", kind="CONSUMER", parent=parent, **{"task.id": task_id})
        task_span.__enter__()
        _tasks[task_id] = task_span


def _end_task(task_id: str, **kwargs: Any) -> None:
    if task_span := _tasks.pop(task_id, None):
        task_span.__exit__(None, None, None)
