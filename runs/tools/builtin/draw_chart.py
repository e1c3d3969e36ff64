"""The built-in tool ``draw_chart``: numbers as the bars of an SVG chart, in which every text is escaped."""

import math
import re
from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from config.kernel.money import MICRO
from runs.tools.base import BuiltinTool, ToolContext, ToolDefinition, ToolResult, input_object, shorten, text_input
from runs.tools.files import store_file

FILE_NAME = "chart.svg"
WIDTH, HEIGHT = 800, 450
LEFT, RIGHT, TOP, BOTTOM = 92, 28, 76, 52
VALUE_MAX = 1e15
TITLE_MAX_CHARS = 200
VALUES_MAX = 1000
TICKS = 5
LABELS_MAX = 12
TITLE_SHOWN_CHARS = 64

INK, GRID, ACCENT, NEGATIVE = "#1f2937", "#e5e7eb", "#2563eb", "#dc2626"
# Characters that XML 1.0 does not allow, even escaped.
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


async def draw_chart(definition: ToolDefinition, input: dict[str, Any], context: ToolContext) -> ToolResult:
    chart = await context.threads.run(context.user_id, draw, input["title"], input["series"])
    url = await store_file(context, FILE_NAME, chart.encode("utf-8", "replace"))
    return ToolResult(f"The chart was drawn: {url}", (url,))


def draw(title: str, series: Sequence[float]) -> str:
    """The chart as an SVG document. ``series`` is one or more numbers from ``-VALUE_MAX`` to ``VALUE_MAX``."""
    values = [float(value) for value in series]
    count, labelled = len(values), len(values) <= LABELS_MAX
    title = " ".join(_NOT_XML.sub("", title).split())
    ticks = axis_ticks(min(values), max(values))
    step, height = (WIDTH - LEFT - RIGHT) / count, HEIGHT - TOP - BOTTOM
    wide = round(min(72.0, step * 0.68), 2)

    def y(value: float) -> float:
        return round(TOP + height * (1 - (value - ticks[0]) / (ticks[-1] - ticks[0])), 2)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label={quoteattr(title)} font-family="system-ui, sans-serif">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="12" fill="#ffffff"/>',
        _label(LEFT, 38, shorten(title, TITLE_SHOWN_CHARS), 'font-size="20" font-weight="600"'),
    ]
    for tick in ticks:
        colour = INK if tick == 0 else GRID
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick)}" y2="{y(tick)}" stroke="{colour}"/>')
        parts.append(_label(LEFT - 10, y(tick) + 4, f"{tick:.6g}", 'font-size="12" text-anchor="end"'))
    for index, value in enumerate(values):
        x, high = round(LEFT + step * (index + 0.5), 2), round(max(abs(y(0) - y(value)), 1.0), 2)
        place = f'x="{round(x - wide / 2, 2)}" y="{min(y(value), y(0))}" width="{wide}" height="{high}"'
        name = f"<title>{index + 1}: {value:.15g}</title>"
        parts.append(f'<rect {place} fill="{ACCENT if value >= 0 else NEGATIVE}">{name}</rect>')
        if labelled:
            parts.append(_label(x, y(value) + (-7 if value >= 0 else 16), f"{value:.6g}"))
        if index % math.ceil(count / LABELS_MAX) == 0:
            parts.append(_label(x, HEIGHT - BOTTOM + 22, str(index + 1)))
    return "\n".join([*parts, "</svg>", ""])


def _label(x: float, y: float, text: str, style: str = 'font-size="12" text-anchor="middle"') -> str:
    return f'<text x="{x}" y="{y:g}" {style} fill="{INK}">{escape(text)}</text>'


def axis_ticks(low: float, high: float) -> list[float]:
    """About ``TICKS`` round values that span the data and zero."""
    low, high = min(low, 0.0), max(high, 0.0)
    rough = max((high - low or 1.0) / TICKS, 1e-300)  # the logarithm of zero fails
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10, 20) if factor * magnitude >= rough * 0.999)
    first, last = math.floor(low / step), max(math.ceil(high / step), math.floor(low / step) + 1)
    return [index * step for index in range(first, last + 1)]


TOOL = BuiltinTool(
    name="draw_chart",
    display_name="Draw a chart",
    description="Draws a series of numbers as an SVG bar chart.",
    input_schema=input_object(
        title=text_input(TITLE_MAX_CHARS, "The chart's heading."),
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
