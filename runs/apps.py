from typing import Any

from corsheaders.signals import check_request_enabled
from django.apps import AppConfig
from django.conf import settings
from django.core.checks import CheckMessage, Warning, register
from django.core.exceptions import ImproperlyConfigured
from django.db import Error
from django.db.models.signals import post_migrate
from django.http import HttpRequest

from config.queue.publisher import nudge_after_commit

RESUME_PAID = "runs.resume_paid"


class RunsConfig(AppConfig):
    name = "runs"

    def ready(self) -> None:
        from credits.models import credits_added
        from runs import purge  # noqa: F401  (registers the receiver of chat_purged)
        from runs.catalogue.seeds import add_builtin_tools

        post_migrate.connect(add_builtin_tools, sender=self, dispatch_uid="runs.builtin_tools")
        credits_added.connect(_resume_paid, dispatch_uid="runs.resume_paid")
        check_request_enabled.connect(_is_of_an_mcp_page, dispatch_uid="runs.mcp_pages")


def _resume_paid(sender: type, user_id: int, **kwargs: Any) -> None:
    nudge_after_commit(RESUME_PAID, str(user_id))


def _is_of_an_mcp_page(sender: None, request: HttpRequest, **kwargs: Any) -> bool:
    """Whether browsers may show the answer to a page of another origin: the receiver of a signal of corsheaders."""
    return request.path_info == "/api/mcp" and request.headers.get("Origin") in settings.MCP_ALLOWED_ORIGINS


@register("catalogue", deploy=True)
def check_models(app_configs: Any = None, **kwargs: Any) -> list[CheckMessage]:
    """Nothing before the first migration: a release checks first. Django's tag ``database`` needs ``--database``."""
    from runs.models import AgentModel

    try:
        enabled = set(AgentModel.objects.filter(enabled=True).values_list("provider__kind", "is_default"))
    except (Error, ImproperlyConfigured):
        return []
    hint = "Add a model in the admin and make it the default."
    if {provider for provider, _ in enabled} <= {"demo"}:
        return [Warning("The catalogue has no model but demo, which is for tests.", hint=hint, id="runs.W001")]
    if ("demo", True) in enabled:
        return [Warning("The default model is demo, which is for tests.", hint=hint, id="runs.W001")]
    return []
