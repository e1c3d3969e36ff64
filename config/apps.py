from django.apps import AppConfig
from django.conf import settings


class PlatformConfig(AppConfig):
    """Commands, tasks and checks that do not belong to one resource."""

    name = "config"
    verbose_name = "Platform"

    def ready(self) -> None:
        # jobs declares metrics that each process can show. publisher sends the metrics of this process.
        import config.queue.jobs
        import config.queue.publisher  # noqa: F401
        from config import checks
        from config.telemetry import logs, sentry, tracing

        logs.capture_unlogged_output()
        # A system check reports packages that are not installed.
        if settings.OTEL_EXPORTER_OTLP_ENDPOINT and checks.is_installed("opentelemetry.exporter"):
            tracing.start()
        if settings.SENTRY_DSN and checks.is_installed("sentry_sdk"):
            sentry.start()
