"""Amounts and durations as text."""

from __future__ import annotations

from datetime import timedelta

from django.utils.html import format_html

from config.kernel import money


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
