"""Words of the admin's pages: names of lists, how long something took, and how long ago it was."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from django.conf import settings
from django.utils.html import format_html

from config.kernel import clock, money


def sidebar_models() -> list[tuple[str, str]]:
    """(name, model) of each list in the sidebar."""
    return [(label, model) for entries in settings.STAFF_NAVIGATION.values() for label, _, model in entries]


def sidebar_name(options: Any) -> str:
    """What the sidebar calls the list of a model."""
    names = {model: label for label, model in sidebar_models()}
    return names.get(options.label_lower, str(options.verbose_name_plural))


def relative(moment: datetime) -> str:
    """``5 s ago``, ``in 3 min``, ``2 h ago``; the date if it is over two days away."""
    away = clock.now() - moment
    if abs(away) > timedelta(days=2):
        return moment.astimezone(UTC).strftime("%Y-%m-%d")
    seconds = abs(int(away.total_seconds()))
    length, unit = next(((size, name) for size, name in ((3600, "h"), (60, "min")) if seconds >= size), (1, "s"))
    text = f"{seconds // length} {unit}"
    return f"in {text}" if away < timedelta(0) else f"{text} ago"


def amount(micro: int) -> str:
    """Credits to read, with the exact amount on hover."""
    text, exact = money.rounded(micro), money.to_text(micro)
    return text if text == exact else format_html('<span title="{} credits">{}</span>', exact, text)


def credit_amount(micro: int) -> str:
    """``12.5 credits``, with the exact amount on hover."""
    return format_html("{} credit{}", amount(micro), "" if micro == money.MICRO else "s")


def span(lasted: timedelta) -> str:
    """A duration as text: ``230 ms``, ``4.2 s``, ``3 min 5 s``, ``2 h 4 min``, ``3 d 2 h``."""
    seconds = max(0.0, lasted.total_seconds())
    if seconds < 1:
        return f"{round(seconds * 1000)} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"
