from importlib import import_module
from typing import Any

from django.apps import AppConfig
from django.conf import settings
from django.contrib.admin.apps import SimpleAdminConfig
from django.contrib.admin.checks import check_admin_app, check_dependencies
from django.core import checks as framework


class PlatformConfig(AppConfig):
    """Commands, tasks and checks that do not belong to one resource."""

    name = "config"
    verbose_name = "Platform"

    def ready(self) -> None:
        from config import checks
        from config.telemetry import logs, sentry, tracing

        logs.capture_unlogged_output()
        # A system check reports packages that are not installed, and a DSN that is not valid.
        if settings.OTEL_EXPORTER_OTLP_ENDPOINT and checks.is_installed("opentelemetry.exporter"):
            tracing.start()
        if checks.is_dsn(settings.SENTRY_DSN) and checks.is_installed("sentry_sdk"):
            sentry.start()


class StaffAdminConfig(SimpleAdminConfig):
    """The admin without its discovery, which ``config.urls`` makes, so that workers do not load the pages."""

    def ready(self) -> None:
        framework.register(check_dependencies, framework.Tags.admin)


@framework.register(framework.Tags.admin)
def check_admin(app_configs: Any, **kwargs: Any) -> list[framework.CheckMessage]:
    """Django's checks of the admin, after its discovery."""
    import_module(settings.ROOT_URLCONF)
    return check_admin_app(app_configs, **kwargs)
