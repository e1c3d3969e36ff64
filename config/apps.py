from django.apps import AppConfig
from django.conf import settings


class PlatformConfig(AppConfig):
    """Commands, tasks and checks that belong to no resource."""

    name = "config"
    verbose_name = "Platform"

    def ready(self) -> None:
        # jobs declares metrics that every process can show; publisher sends what the process counts.
        import config.queue.jobs
        import config.queue.publisher  # noqa: F401
        from config import checks
        from config.telemetry import logs, sentry, tracing

        logs.catch_strays()
        # What is not installed is left out here, and named by the check.
        if settings.OTEL_EXPORTER_OTLP_ENDPOINT and checks.is_installed("opentelemetry.exporter"):
            tracing.start()
        if settings.SENTRY_DSN and checks.is_installed("sentry_sdk"):
            sentry.start()
