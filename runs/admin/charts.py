"""Charts of the admin: their data and options for Chart.js."""

from __future__ import annotations

import json
from typing import Any

PALETTE = ["#3b82f6", "#22c55e", "#f59e0b", "#a855f7", "#14b8a6", "#ec4899", "#94a3b8"]
LEGEND = {
    "plugins": {"legend": {"display": True, "position": "bottom", "align": "start", "labels": {"boxWidth": 10}}},
    "responsive": True,
    "maintainAspectRatio": False,
    "animation": False,
}
STACKED = LEGEND | {
    "scales": {
        "x": {"stacked": True, "grid": {"display": False}, "ticks": {"maxTicksLimit": 8}},
        "y": {"stacked": True, "beginAtZero": True, "ticks": {"maxTicksLimit": 5}},
    }
}


def chart(labels: list[str], series: list[tuple[str, str, list[Any]]], total: str) -> dict[str, Any]:
    """The data of a chart for Chart.js, and its total as text."""
    datasets = [
        {"label": label, "data": data, "backgroundColor": colour, "borderRadius": 2, "maxBarThickness": 28}
        for label, colour, data in series
    ]
    return {"data": json.dumps({"labels": labels, "datasets": datasets}), "total": total, "empty": not series}
