"""Template filters of the admin."""

from typing import Any

from django import template
from django.conf import settings
from django.contrib.auth import get_user_model
from django.db.models import Model
from django.template.defaultfilters import capfirst
from django.urls import reverse
from django.utils.safestring import mark_safe

register = template.Library()
SUPERUSERS_NAMED = 3


@register.filter
def with_main(page: str) -> str:
    """Unfold's page, which is safe HTML, with a landmark: ``#main`` is its last element but one."""
    inside, after, end = page.replace('<div id="main"', '<main id="main"', 1).rsplit("</div>", 2)
    return mark_safe(f"{inside}</main>{after}</div>{end}")  # noqa: S308


@register.filter
def heading(part: dict[str, Any]) -> str:
    """A part of a page's heading: a list as the sidebar calls it, a row as its name is written."""
    lists = [entry for entries in settings.STAFF_NAVIGATION.values() for entry in entries]
    names = {reverse(f"admin:{model.replace('.', '_')}_changelist"): name for name, _, model in lists}
    title = part["title"]
    return names.get(str(part.get("link"))) or (str(title) if isinstance(title, Model) else capfirst(title))


@register.simple_tag
def superusers() -> list[str]:
    """The names of some superusers, who can give roles to other staff."""
    users = get_user_model()._default_manager.filter(is_superuser=True, is_active=True).order_by("pk")
    return [user.get_username() for user in users[:SUPERUSERS_NAMED]]


@register.filter
def credits(micro: int | None) -> str:
    """Micro-credits as credits; a dash if they are not known."""
    from config.staff.base import amount  # the admin, which loads the templates' libraries

    return "–" if micro is None else amount(micro)
