"""Template filters of the admin."""

from datetime import UTC, datetime
from typing import Any

from django import template
from django.template.defaultfilters import capfirst
from django.urls import reverse

from config.kernel import money
from config.kernel.ids import short_id
from config.staff.words import relative, sidebar_models

register = template.Library()
register.filter("ago", relative)
register.filter("short", short_id)


@register.filter
def clock(moment: datetime) -> str:
    """Time of day to the millisecond, UTC."""
    return moment.astimezone(UTC).strftime("%H:%M:%S.%f")[:-3]


@register.filter
def heading(title: object) -> str:
    """The title with a capital first letter, unless it is an id."""
    return str(title) if "_" in str(title) else capfirst(str(title))


@register.filter
def credits(micro: int | None) -> str:
    """Micro-credits as credits; a dash if they are not known."""
    return "—" if micro is None else money.to_text(micro)


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
