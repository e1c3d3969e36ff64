"""Template filters of the admin."""

from datetime import UTC, datetime
from typing import Any

from django import template
from django.db.models import Model
from django.template.defaultfilters import capfirst
from django.urls import reverse
from django.utils.safestring import mark_safe

from config.kernel.ids import short_id
from config.staff.words import amount, relative, sidebar_models

register = template.Library()
register.filter("ago", relative)
register.filter("short", short_id)


@register.filter
def with_main(page: str) -> str:
    """Unfold's page, which is safe, with a landmark: ``#main`` is its last but one element."""
    inside, after, end = page.replace('<div id="main"', '<main id="main"', 1).rsplit("</div>", 2)
    return mark_safe(f"{inside}</main>{after}</div>{end}")  # noqa: S308


@register.filter
def clock(moment: datetime) -> str:
    """Time of day to the millisecond, UTC."""
    return moment.astimezone(UTC).strftime("%H:%M:%S.%f")[:-3]


@register.filter
def heading(title: object) -> str:
    """The title with a capital first letter, unless it is the name of a row."""
    return str(title) if isinstance(title, Model) or "_" in str(title) else capfirst(str(title))


@register.filter
def credits(micro: int | None) -> str:
    """Micro-credits as credits; a dash if they are not known."""
    return "–" if micro is None else amount(micro)


@register.simple_tag
def page_parts(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The parts of a page's title with the names of the sidebar, without the app, which the sidebar does not name."""
    names = {reverse(f"admin:{model.replace('.', '_')}_changelist"): label for label, model in sidebar_models()}
    apps = {reverse("admin:app_list", args=[model.partition(".")[0]]) for _, model in sidebar_models()}
    return [
        part | {"title": names.get(str(part.get("link")), part["title"])}
        for part in parts
        if str(part.get("link")) not in apps
    ]
