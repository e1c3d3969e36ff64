"""Template filters of the admin."""

from django import template
from django.utils.safestring import mark_safe

register = template.Library()


@register.filter
def with_main(page: str) -> str:
    """Unfold's page, which is safe, with a landmark: ``#main`` is its last but one element."""
    inside, after, end = page.replace('<div id="main"', '<main id="main"', 1).rsplit("</div>", 2)
    return mark_safe(f"{inside}</main>{after}</div>{end}")  # noqa: S308


@register.filter
def credits(micro: int | None) -> str:
    """Micro-credits as credits; a dash if they are not known."""
    from config.staff.base import amount  # the admin, which loads the templates' libraries

    return "–" if micro is None else amount(micro)
