"""Template filters of the admin."""

from datetime import UTC, datetime

from django import template
from django.template.defaultfilters import capfirst

from config.kernel import money

register = template.Library()


@register.filter
def clock(moment: datetime) -> str:
    """Time of day to the millisecond, UTC."""
    return moment.astimezone(UTC).strftime("%H:%M:%S.%f")[:-3]


@register.filter
def heading(title: object) -> str:
    """The title with a capital first letter, unless it is an id."""
    return str(title) if "_" in str(title) else capfirst(str(title))


@register.filter
def credits(micro: int) -> str:
    """Micro-credits as credits."""
    return money.to_text(micro)
