"""OpenTelemetry traces, from a request through the task that it starts to the run's model and tool calls.

Only with OTEL_EXPORTER_OTLP_ENDPOINT; without it nothing is imported and ``span`` does nothing. Spans carry ids, names
and states, never what users wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from celery import signals
from django.http import HttpRequest
from django.http.response import HttpResponseBase

SERVICE_NAME = "agent-workflow-service"

_tracer: Any = None
# Of the tasks that this process is at: task id → what ends its span.
_tasks: dict[str, Any] = {}


def start() -> None:
    """Send spans in the background from now on. Where to, and how many, the SDK reads from its own variables."""
    global _tracer
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    # A name in OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES wins.
    named = Resource({"service.name": SERVICE_NAME}).merge(Resource.create())
    own = "unknown_service" in str(named.attributes["service.name"])
    provider = TracerProvider(resource=named.merge(Resource({"service.name": SERVICE_NAME})) if own else named)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    _tracer = trace.get_tracer("service")
    signals.before_task_publish.connect(_send_with_message, dispatch_uid="config.telemetry.tracing")
    signals.task_prerun.connect(_begin_task, dispatch_uid="config.telemetry.tracing")
    signals.task_postrun.connect(_end_task, dispatch_uid="config.telemetry.tracing")


@contextmanager
def span(name: str, *, kind: str = "INTERNAL", parent: Any = None, **attributes: str) -> Iterator[Any]:
    """A span around the block, within the one that is under way. An exception marks it with its type alone."""
    if _tracer is None:
        yield None
        return
    from opentelemetry.trace import SpanKind, Status, StatusCode

    with _tracer.start_as_current_span(
        name,
        context=parent,
        kind=SpanKind[kind],
        attributes=attributes,
        record_exception=False,
        set_status_on_exception=False,
    ) as current:
        try:
            yield current
        except BaseException as error:
            current.set_status(Status(StatusCode.ERROR, type(error).__name__))
            raise


def current() -> str | None:
    """The span that is under way, as W3C's ``traceparent`` names it; None without one."""
    if _tracer is None:
        return None
    from opentelemetry.propagate import inject

    carrier: dict[str, str] = {}
    inject(carrier)
    return carrier.get("traceparent")


def continuing(traceparent: str | None) -> Any:
    """``span``'s parent for work that no message led to: the span so named, unless one is under way."""
    if _tracer is None or traceparent is None or current() is not None:
        return None
    from opentelemetry.propagate import extract

    return extract({"traceparent": traceparent})


class TracingMiddleware:
    """A span a request, within the caller's trace if ``traceparent`` names one. In MIDDLEWARE only with an endpoint."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        from opentelemetry.propagate import extract

        from config.telemetry.logs import request_id

        caller = extract(request.headers)
        with span(str(request.method), kind="SERVER", parent=caller, **{"request.id": request_id.get()}) as current:
            response = self.get_response(request)
            route = request.resolver_match.route if request.resolver_match else "(none)"
            current.update_name(f"{request.method} {route}")
            current.set_attribute("http.route", route)
            current.set_attribute("http.response.status_code", response.status_code)
            return response


def _send_with_message(headers: dict[str, Any] | None = None, **kwargs: Any) -> None:
    from opentelemetry.propagate import inject

    if headers is not None:
        inject(headers)


def _begin_task(task_id: str, task: Any, **kwargs: Any) -> None:
    """Of tasks that a request has led to; the clock's own would be noise."""
    from opentelemetry.propagate import extract

    if traceparent := task.request.get("traceparent"):
        parent = extract({"traceparent": traceparent})
        under_way = span(f"task {task.name}", kind="CONSUMER", parent=parent, **{"task.id": task_id})
        under_way.__enter__()
        _tasks[task_id] = under_way


def _end_task(task_id: str, **kwargs: Any) -> None:
    if under_way := _tasks.pop(task_id, None):
        under_way.__exit__(None, None, None)
