"""System check of the catalogue for production, by ``manage.py check --deploy``. It reads the database.

Django's tag ``database`` would leave it out without ``--database``, and the release checks before the first migration.
"""

from __future__ import annotations

from typing import Any

from django.core.checks import CheckMessage, Warning, register
from django.core.exceptions import ImproperlyConfigured
from django.db import Error

from runs.models import AgentModel

DEMO = "demo"
HINT = "Add a model in the admin and make it the default."


@register("catalogue", deploy=True)
def check_models(app_configs: Any = None, **kwargs: Any) -> list[CheckMessage]:
    """Nothing without a database with tables: other checks and the release report that."""
    try:
        enabled = set(AgentModel.objects.filter(enabled=True).values_list("provider__kind", "is_default"))
    except (Error, ImproperlyConfigured):
        return []
    if {provider for provider, _ in enabled} <= {DEMO}:
        return [Warning("The catalogue has no model but demo, which is for tests.", hint=HINT, id="runs.W001")]
    if (DEMO, True) in enabled:
        return [Warning("The default model is demo, which is for tests.", hint=HINT, id="runs.W001")]
    return []
