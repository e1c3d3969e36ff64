"""The example dashboard, the alert rules and the docs name only metrics, labels, jobs and settings that exist."""

import json
import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

import promql_parser
import pytest
import yaml
from django.conf import settings
from prometheus_client.parser import text_string_to_metric_families

from config.telemetry import metrics
from tests.stack.process import ROOT

pytestmark = pytest.mark.django_db

DOCS = ROOT / "docs"
DASHBOARD = json.loads((DOCS / "grafana" / "dashboard.json").read_text())
RULES = yaml.safe_load((DOCS / "prometheus" / "alerts.yml").read_text())["groups"][0]["rules"]
OPERATIONS = (DOCS / "operations.md").read_text()
PANELS = [(panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel["targets"]]
EXPRESSIONS = PANELS + [(rule["alert"], rule["expr"]) for rule in RULES]


def parts(expression: Any) -> Iterator[Any]:
    """The node and all its descendants."""
    yield expression
    for name in ("lhs", "rhs", "expr", "vector_selector", "args", "param"):
        below = getattr(expression, name, None)
        for one in below if isinstance(below, list) else [below]:
            if one is not None and type(one).__module__.startswith("promql"):
                yield from parts(one)


def parsed(expression: str) -> list[Any]:
    return list(parts(promql_parser.parse(expression.replace("$__rate_interval", "5m"))))


# The labels of each series on the metrics page, by the name of the series. One look at the page serves all tests.
LABELS: dict[str, set[str]] = {}


@pytest.fixture
def labels_of(request: pytest.FixtureRequest) -> dict[str, set[str]]:
    if not LABELS:
        LABELS.update(read_labels(request.getfixturevalue("scrape")))
    return LABELS


def read_labels(scrape: Any) -> dict[str, set[str]]:
    page = scrape()  # the first request loads the modules that declare metrics
    found: dict[str, set[str]] = {"up": {"job"}}
    # Also those without a series, which the page does not show yet.
    for metric in metrics.registry._collector_to_names:
        (family,), labels = metric.collect(), set(metric._labelnames)
        name = family.name
        if name.startswith(metrics.PREFIX + "test_"):
            continue
        if family.type == "counter":
            found[f"{name}_total"] = labels
        elif family.type == "histogram":
            found[f"{name}_bucket"] = {*labels, "le"}
            found[f"{name}_count"] = found[f"{name}_sum"] = labels
        else:
            found[name] = labels
    found[metrics.PREFIX + metrics.LAST_SUCCESS] = {"job"}
    for family in text_string_to_metric_families(page.text):
        for sample in family.samples:
            if sample.name.startswith(metrics.PREFIX + "test_"):
                continue
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.mark.parametrize(("title", "expression"), EXPRESSIONS)
def test_every_query_is_valid_and_uses_existing_metrics(labels_of, title, expression):
    nodes = parsed(expression)
    selectors = [node for node in nodes if isinstance(node, promql_parser.VectorSelector)]
    assert selectors
    known: set[str] = set()
    for selector in selectors:
        assert selector.name in labels_of, f"{title}: there is no {selector.name}"
        asked = {matcher.name for matcher in selector.matchers.matchers}
        assert asked <= labels_of[selector.name], f"{title}: {selector.name} has no {asked}"
        known |= labels_of[selector.name]
    for node in nodes:
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            assert set(node.modifier.labels) <= known, title


def test_nested_selectors_are_found():
    """``parsed`` finds selectors at every depth."""
    (deep,) = [e for title, e in EXPRESSIONS if title == "RunsFail"]
    names = [node.name for node in parsed(deep) if isinstance(node, promql_parser.VectorSelector)]
    assert names == ["agents_runs_finished_total"] * 2


def test_every_metric_is_documented_and_has_a_panel(labels_of):
    explained = set(re.findall(r"`(\w+)`", OPERATIONS))
    shown = " ".join(expression for _, expression in PANELS)
    for name in labels_of:
        if name == "up" or name.endswith(("_count", "_sum")):
            continue
        own = name.removeprefix(metrics.PREFIX).removesuffix("_bucket")
        assert own in explained, f"docs/operations.md does not explain {own}"
        assert name in shown, f"no panel shows {name}"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_every_alert_has_instructions(rule):
    section = re.search(rf"^### {rule['alert']}\n(.+?)(?=^#|\Z)", OPERATIONS, re.M | re.S)
    assert section
    assert re.findall(r"^\*\*(\w+)\.\*\* \S", section[1], re.M) == ["Meaning", "Look", "Do"]
    assert rule["annotations"]["summary"]
    assert rule["labels"]["severity"] in ("page", "ticket")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_every_alert_links_its_instructions(client, rule):
    link = urlsplit(rule["annotations"]["runbook_url"])
    assert (link.scheme, link.hostname) == ("https", "agents.example.com")  # as in prometheus.yml
    assert client.get(link.path).status_code == 200
    assert link.path.endswith("/operations")
    # The id that the site gives to the heading.
    assert link.fragment == rule["alert"].lower()
    assert re.search(rf"^### {rule['alert']}\b", OPERATIONS, re.M)


def test_every_section_is_about_an_existing_alert():
    assert set(re.findall(r"^### (\w+)", OPERATIONS, re.M)) == {rule["alert"] for rule in RULES}


def test_every_job_is_listed_with_its_interval():
    rows = dict(re.findall(r"^\| `([a-z]+-[a-z-]+)` \| ([\w ]+) \|", OPERATIONS, re.M))
    units = {"s": 1, "min": 60, "h": 3600}
    documented = {job: float(number) * units[unit] for job, (number, unit) in ((j, r.split()) for j, r in rows.items())}
    assert documented == {job: entry["schedule"] for job, entry in settings.CELERY_BEAT_SCHEDULE.items()}


def test_every_job_has_an_alert():
    """The alert for stale jobs matches each job by the first word of its name."""
    (stale,) = [rule["expr"] for rule in RULES if rule["alert"] == "HousekeepingStale"]
    patterns = re.findall(r'job=~"([^"]+)"', stale)
    for job in settings.CELERY_BEAT_SCHEDULE:
        assert sum(bool(re.fullmatch(pattern, job)) for pattern in patterns) == 1, job
    assert "absent(" in stale  # beat was never started


def test_the_job_by_hand_exists():
    ((module, job),) = re.findall(r'shell -c "from (\S+) import (\w+); \2\(\)"', OPERATIONS)
    assert callable(getattr(import_module(module), job))


def test_panels_have_different_positions():
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in DASHBOARD["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)


@pytest.mark.parametrize("page", ["operations.md", "deploy.md"])
def test_documented_settings_exist(page):
    names = set(re.findall(r"`([A-Z][A-Z0-9]+_[A-Z0-9_]+)`", (DOCS / page).read_text()))
    foreign = {name for name in names if name.startswith(("OTEL_", "POSTGRES_", "RESTORED_"))}
    codes = {"TOOL_ERROR", "MODEL_ERROR", "MODEL_TIMEOUT", "WORKER_LOST", "INTERNAL_ERROR", "OUTCOME_UNKNOWN"}
    assert names - foreign - codes <= set(settings.ENV.known)


def test_rotation_of_every_secret_is_documented():
    text = (DOCS / "deploy.md").read_text()
    table = text[text.index("## Rotating secrets") : text.index("## Backups")]
    secrets = {name for name in settings.ENV.known if re.search(r"(_KEYS?|_TOKEN|_DSN|DATABASE_URL|REDIS_URL)$", name)}
    secrets = {name for name in secrets if not name.startswith("RATE_LIMIT_")}
    assert {"SECRET_KEY", "ENCRYPTION_KEYS", "METRICS_TOKEN"} < secrets
    assert {name for name in secrets if f"`{name}`" not in table} == set()
