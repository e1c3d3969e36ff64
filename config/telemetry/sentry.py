"""Reports of unexpected exceptions to Sentry, only with SENTRY_DSN; without it nothing is imported.

A report tells types and places. What users wrote could be in local variables, bodies, query strings, headers and
exceptions' messages, so none of these is sent.
"""

from __future__ import annotations

import logging
from typing import Any

from django.conf import settings

from config.telemetry import logs


def start() -> None:
    import sentry_sdk
    from sentry_sdk.integrations.celery import CeleryIntegration
    from sentry_sdk.integrations.django import DjangoIntegration
    from sentry_sdk.integrations.logging import LoggingIntegration

    sentry_sdk.init(
        dsn=settings.SENTRY_DSN,
        send_default_pii=False,
        include_local_variables=False,
        max_request_body_size="never",
        max_breadcrumbs=0,
        # Any other that it finds installed could send more than is known here.
        auto_enabling_integrations=False,
        integrations=[
            DjangoIntegration(middleware_spans=False, signals_spans=False, cache_spans=False),
            CeleryIntegration(),
            LoggingIntegration(level=None, event_level=logging.ERROR),
        ],
        before_send=without_content,
    )


def without_content(event: Any, hint: Any) -> Any:
    request = event.get("request") or {}
    event["request"] = {"method": request.get("method")}
    event.pop("extra", None)
    event.pop("user", None)
    for error in (event.get("exception") or {}).get("values", ()):
        error["value"] = ""
    # The text of the line, not what was put into it.
    if "logentry" in event:
        event["logentry"] = {"message": event["logentry"].get("message")}
    event.setdefault("tags", {}).update({variable.name: variable.get() for variable in logs.VARIABLES})
    return event
