"""The built-in tool ``draw_chart``: numbers as an SVG chart, bars for a few values and a line for many.

Every text in the SVG is escaped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from config.kernel.money import MICRO
from runs.tools.base import BuiltinTool, ToolContext, ToolDefinition, ToolResult, in_thread, input_object, shorten
from runs.tools.files import store_file

FILE_NAME = "chart.svg"
WIDTH, HEIGHT = 800, 450
LEFT, RIGHT, TOP, BOTTOM = 76, 28, 76, 52
BARS_MAX = 24
VALUE_MAX = 1e15
TITLE_MAX_CHARS = 200
VALUES_MAX = 1000
TICKS = 5
LABELS_MAX = 12
TITLE_SHOWN_CHARS = 64

INK, MUTED, GRID, ACCENT, NEGATIVE = "#1f2937", "#6b7280", "#e5e7eb", "#2563eb", "#dc2626"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
# Characters that XML 1.0 does not allow, even escaped.
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


async def draw_chart(definition: ToolDefinition, input: dict[str, Any], context: ToolContext) -> ToolResult:
    chart = await in_thread(context, draw, input["title"], input["series"])
    url = await store_file(context, FILE_NAME, chart.encode("utf-8", "replace"))
    return ToolResult(f"The chart was drawn: {url}", (url,))


def draw(title: str, series: Sequence[float]) -> str:
    """The chart as an SVG document. ``series`` is one or more numbers from ``-VALUE_MAX`` to ``VALUE_MAX``."""
    values = [float(value) for value in series]
    title = " ".join(_NOT_XML.sub("", title).split())
    shown = shorten(title, TITLE_SHOWN_CHARS)
    ticks = axis_ticks(min(values), max(values), zero=len(values) <= BARS_MAX)
    scale = _Scale(ticks[0], ticks[-1], len(values))
    marks = _bars(values, scale) if len(values) <= BARS_MAX else _line(values, scale)
    summary = (
        f"{len(values)} value{'s' if len(values) > 1 else ''}, "
        f"from {number_text(min(values))} to {number_text(max(values))}"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
            f'role="img" aria-label={quoteattr(f"{title}: {summary}")} font-family="{FONT}">',
            f"<title>{escape(title)}</title>",
            f"<desc>{escape(summary)}</desc>",
            f'<rect width="{WIDTH}" height="{HEIGHT}" rx="12" fill="#ffffff"/>',
            f'<text x="{LEFT}" y="38" font-size="20" font-weight="600" fill="{INK}">{escape(shown)}</text>',
            f'<text x="{LEFT}" y="58" font-size="12" fill="{MUTED}">{escape(summary)}</text>',
            *_grid(ticks, scale),
            *marks,
            *_positions(len(values), scale),
            "</svg>",
            "",
        ]
    )


def axis_ticks(low: float, high: float, *, zero: bool) -> list[float]:
    """About ``TICKS`` round values that span the data. ``zero`` puts zero on the axis, as bars need."""
    if zero or low == high:
        low, high = min(low, 0.0), max(high, 0.0)
    if low == high:
        high = 1.0
    # The logarithm of a smaller difference fails.
    rough = max((high - low) / TICKS, 1e-300)
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10, 20) if factor * magnitude >= rough * 0.999)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [index * step for index in range(first, last + 1)]


def number_text(value: float) -> str:
    """``1234567.0`` → ``1.23M``: short enough for an axis."""
    for size, unit, suffix in ((1e12, 1e12, "T"), (1e9, 1e9, "B"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= size:
            return f"{value / unit:.4g}{suffix}"
    return f"{value:.6g}" if value else "0"


class _Scale:
    def __init__(self, low: float, high: float, count: int) -> None:
        self.low, self.high = low, high
        self.count = count
        self.width, self.height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(TOP + self.height * (1 - share), 2)

    def x(self, index: int) -> float:
        """The middle of a bar, or a point of the line, which begins and ends at the edges."""
        share = (index + 0.5) / self.count if self.count <= BARS_MAX else index / (self.count - 1)
        return round(LEFT + self.width * share, 2)


def _grid(ticks: list[float], scale: _Scale) -> list[str]:
    parts = []
    for tick in ticks:
        y = scale.y(tick)
        colour = MUTED if tick == 0 else GRID
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="1"/>')
        parts.append(
            f'<text x="{LEFT - 10}" y="{y + 4:g}" font-size="12" text-anchor="end" fill="{MUTED}">'
            f"{number_text(tick)}</text>"
        )
    return parts


def _bars(values: list[float], scale: _Scale) -> list[str]:
    width = round(min(72.0, scale.width / scale.count * 0.68), 2)
    zero = scale.y(0)
    parts = []
    for index, value in enumerate(values):
        x, y = round(scale.x(index) - width / 2, 2), scale.y(value)
        height = round(max(abs(zero - y), 1.0), 2)
        colour = ACCENT if value >= 0 else NEGATIVE
        parts.append(
            f'<rect x="{x}" y="{min(y, zero)}" width="{width}" height="{height}" rx="{min(3.0, height / 2):g}" '
            f'fill="{colour}"><title>{index + 1}: {value:.15g}</title></rect>'
        )
        if scale.count <= LABELS_MAX:
            label_y = y - 7 if value >= 0 else y + 16
            parts.append(
                f'<text x="{scale.x(index)}" y="{label_y:g}" font-size="12" text-anchor="middle" fill="{INK}">'
                f"{number_text(value)}</text>"
            )
    return parts


def _line(values: list[float], scale: _Scale) -> list[str]:
    points = " ".join(f"{scale.x(index)},{scale.y(value)}" for index, value in enumerate(values))
    base = scale.y(min(max(0.0, scale.low), scale.high))
    first, last = scale.x(0), scale.x(len(values) - 1)
    return [
        f'<polygon points="{first},{base} {points} {last},{base}" fill="{ACCENT}" fill-opacity="0.1"/>',
        f'<polyline points="{points}" fill="none" stroke="{ACCENT}" stroke-width="2" stroke-linejoin="round" '
        'stroke-linecap="round"/>',
    ]


def _positions(count: int, scale: _Scale) -> list[str]:
    step = max(1, math.ceil(count / LABELS_MAX))
    return [
        f'<text x="{scale.x(index)}" y="{HEIGHT - BOTTOM + 22}" font-size="12" text-anchor="middle" fill="{MUTED}">'
        f"{index + 1}</text>"
        for index in range(0, count, step)
    ]


TOOL = BuiltinTool(
    name="draw_chart",
    display_name="Draw a chart",
    description=f"Draws a series of numbers as an SVG chart, bars for up to {BARS_MAX} values and a line for more.",
    input_schema=input_object(
        title={"type": "string", "minLength": 1, "maxLength": TITLE_MAX_CHARS, "description": "The chart's heading."},
        series={
            "type": "array",
            "items": {"type": "number", "minimum": -VALUE_MAX, "maximum": VALUE_MAX},
            "minItems": 1,
            "maxItems": VALUES_MAX,
            "description": "The values, in order.",
        },
    ),
    price=12 * MICRO,
    execute=draw_chart,
    stores_files=True,
)
