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
    """The page's samples by name and labels, summed over the processes, without what was ``counted`` before."""

    def __init__(self, text: str, counted: Samples | None = None) -> None:
        self.text = text
        self.samples: Samples = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = tuple(sorted((key, value) for key, value in sample.labels.items() if key != "process"))
                is_count = family.type in ("counter", "histogram")
                before = counted.get((sample.name, labels), 0.0) if counted and is_count else 0.0
                self.samples.setdefault((sample.name, labels), -before)
                self.samples[sample.name, labels] += sample.value

    def __call__(self, name: str, **labels: str) -> float | None:
        value = self.samples.get((metrics.PREFIX + name, tuple(sorted(labels.items()))))
        return None if value is None else round(value, 9)


@pytest.fixture
def scrape(limits: Any, client: Client, monkeypatch: pytest.MonkeyPatch) -> Callable[[], MetricsPage]:  # noqa: F811
    """Sends the metrics of this process and reads the page again."""
    limits.METRICS_TOKEN = "scraper"
    limits.METRICS_CACHE_SECONDS = 0
    counted = MetricsPage(metrics.exposition(metrics.registry.collect())).samples

    def read() -> MetricsPage:
        metrics.report()
        monkeypatch.setattr(metrics_page, "_kept", None)
        answer = client.get("/metrics", headers={"Authorization": "Bearer scraper"})
        assert answer.status_code == 200, answer.content
        return MetricsPage(answer.content.decode(), counted)

    return read
