"""Reports of unexpected exceptions to Sentry: types and code locations. Local variables, bodies, query strings, headers
and exception messages can contain user content, so they are not sent. The SDK is imported only with SENTRY_DSN.
"""

import logging
from typing import Any

from django.conf import settings

from config.telemetry import logs


def start() -> None:
    """Send reports from now on. Requires sentry_sdk."""
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
        # An integration that the SDK enables by itself could send user content.
        auto_enabling_integrations=False,
        integrations=[
            DjangoIntegration(middleware_spans=False, signals_spans=False, cache_spans=False),
            CeleryIntegration(),
            LoggingIntegration(level=None, event_level=logging.ERROR),
        ],
        before_send=remove_content,
    )


def remove_content(event: Any, hint: Any) -> Any:
    """The report without user content and with the ids of request, run and task as tags."""
    event["request"] = {"method": (event.get("request") or {}).get("method")}
    event.pop("extra", None)
    event.pop("user", None)
    for error in (event.get("exception") or {}).get("values", ()):
        error["value"] = ""
    # The message template without its arguments.
    if "logentry" in event:
        event["logentry"] = {"message": event["logentry"].get("message")}
    event.setdefault("tags", {}).update(logs.ids())
    return event
