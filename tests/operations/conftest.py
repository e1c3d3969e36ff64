from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.test import Client
from prometheus_client.parser import text_string_to_metric_families

from config.api import metrics_page
from config.telemetry import metrics
from tests.api.conftest import limits, redis_server  # noqa: F401  (a separate Redis for tests)

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class MetricsPage:
    """The page's samples by name and labels."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.samples: Samples = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float | None:
        return self.samples.get((metrics.PREFIX + name, tuple(sorted(labels.items()))))


@pytest.fixture
def scrape(limits: Any, client: Client, monkeypatch: pytest.MonkeyPatch) -> Callable[[], MetricsPage]:  # noqa: F811
    """Sends the metrics of this process and reads the page again."""
    limits.METRICS_TOKEN = "scraper"
    limits.METRICS_CACHE_SECONDS = 0
    metrics.recorder.sums.clear()

    def read() -> MetricsPage:
        metrics.recorder.flush()
        monkeypatch.setattr(metrics_page, "_kept", None)
        answer = client.get("/metrics", headers={"Authorization": "Bearer scraper"})
        assert answer.status_code == 200, answer.content
        return MetricsPage(answer.content.decode())

    return read
