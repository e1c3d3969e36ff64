"""``/metrics``: access, the metrics that processes send, and the metrics that are read from the database."""

from datetime import timedelta

import pytest
import redis
from django.conf import settings as project
from django.db import OperationalError, connection
from django.test import Client

from config import celery
from config.kernel import clock
from config.kernel.ids import new_id
from config.queue import jobs
from config.telemetry import metrics
from credits import ledger
from runs.metrics import gauges
from tests import factories
from tests.plans import plans_of

pytestmark = pytest.mark.django_db


# --- access ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("given", [None, "", "Bearer", "Bearer ", "Bearer wrong", "Basic scraper", "scraper"])
def test_metrics_require_the_token(client, scrape, given):
    answer = client.get("/metrics", headers={"Authorization": given} if given is not None else {})
    assert answer.status_code == 401
    assert answer["WWW-Authenticate"] == "Bearer"
    assert b"agents_" not in answer.content


def test_an_empty_token_setting_permits_no_access(client, scrape, settings):
    settings.METRICS_TOKEN = ""
    for given in ("Bearer ", "Bearer", "Bearer x"):
        assert client.get("/metrics", headers={"Authorization": given}).status_code == 401


def test_debug_mode_requires_no_token(client, scrape, settings):
    settings.DEBUG = True
    assert client.get("/metrics").status_code == 200


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/metrics"])
def test_probes_need_no_host_name_and_no_https(client, settings, path):
    settings.ALLOWED_HOSTS = ["agents.example.com"]
    settings.SECURE_SSL_REDIRECT = True
    answer = client.get(path, headers={"Host": "10.1.2.3:8000"})
    assert answer.status_code in (200, 401, 503)
    assert answer["X-Request-Id"]


def test_metrics_accept_only_get():
    assert Client(enforce_csrf_checks=True).post("/metrics").status_code == 405


# --- requests --------------------------------------------------------------------------------------------------------
def test_requests_are_counted_by_route_and_status(session, scrape):
    session.get("/api/v1/chats/chat_secretlookingid")
    session.get("/api/v1/chats")
    session.generic("BREW", "/api/v1/chats")
    session.get("/nowhere/secretlookingid")
    for probe in ("/livez", "/readyz", "/metrics"):
        session.get(probe)
    shown = scrape()
    chat = "api/v1/chats/<str:chatId>"
    assert shown("http_requests_total", method="GET", route=chat, status="404") == 1
    assert shown("http_requests_total", method="GET", route="api/v1/chats", status="200") == 1
    assert shown("http_requests_total", method="(other)", route="api/v1/chats", status="405") == 1
    assert shown("http_requests_total", method="GET", route="(none)", status="404") == 1
    assert shown("http_request_seconds_count", route="(none)") == 1  # probes and scrapes are not counted
    assert shown("http_request_seconds_count", route=chat) == 1
    assert "secretlookingid" not in shown.text


# --- metrics of many processes ---------------------------------------------------------------------------------------
def report_of(other: str, monkeypatch) -> None:
    """Report the metrics of this process as those of another one."""
    with monkeypatch.context() as patch:
        patch.setattr(metrics, "this_process", lambda: other)
        metrics.report()


def test_the_page_joins_the_processes(scrape, monkeypatch):
    counter = metrics.Counter("test_things", "Things.", ["kind"])
    counter.labels("# HELP of\nall").inc(2)
    report_of("a:1", monkeypatch)
    counter.labels("b").inc()
    shown = scrape()
    assert shown("test_things_total", kind="# HELP of\nall") == 4
    assert shown("test_things_total", kind="b") == 1
    assert shown.text.count("# TYPE agents_test_things_total counter") == 1
    assert 'kind="b",process="' + metrics.this_process() in shown.text


def test_an_ended_process_is_no_longer_shown(scrape, settings, monkeypatch):
    metrics.PerProcess("test_open", "Things.").set_function(lambda: 3)
    report_of("a:1", monkeypatch)
    report_of("b:2", monkeypatch)
    assert scrape()("test_open") == 9
    with redis.Redis.from_url(settings.CACHE_REDIS_URL) as client:
        assert 0 < client.ttl(metrics.TEXT + "a:1") <= metrics.PROCESS_SECONDS + settings.METRICS_FLUSH_SECONDS
        client.delete(metrics.TEXT + "a:1")  # as after that time
        assert scrape()("test_open") == 6
        assert b"a:1" not in client.smembers(metrics.PROCESSES)


def test_metrics_are_kept_while_redis_is_down(scrape, settings):
    counter = metrics.Counter("test_kept", "Things.")
    url = settings.CACHE_REDIS_URL
    counter.inc()
    settings.CACHE_REDIS_URL = "redis://127.0.0.1:1"
    jobs.run("test-kept", lambda: 1)
    metrics.report()
    counter.inc()
    shown = scrape()
    assert shown("source_up", source="redis") == 0
    assert shown("source_up", source="database") == 1
    assert shown("runs", state="queued") == 0
    assert shown("test_kept_total") == 2
    settings.CACHE_REDIS_URL = url
    assert scrape()("housekeeping_last_success_timestamp_seconds", job="test-kept") > 0


def test_other_metrics_are_shown_while_the_database_is_down(scrape, monkeypatch):
    def away() -> None:
        raise OperationalError("no route to secret-host")

    monkeypatch.setattr("runs.metrics.gauges", away)
    shown = scrape()
    assert shown("source_up", source="database") == 0
    assert shown("queue_messages", queue="runs") == 0
    assert "secret-host" not in shown.text


def test_histogram_buckets_are_cumulative(scrape):
    histogram = metrics.Histogram("test_seconds", "Seconds.", ["kind"], buckets=(0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 7):
        histogram.labels("a").observe(value)
    shown = scrape()
    assert [shown("test_seconds_bucket", kind="a", le=le) for le in ("0.1", "1.0", "+Inf")] == [2, 3, 4]
    assert shown("test_seconds_count", kind="a") == 4
    assert shown("test_seconds_sum", kind="a") == pytest.approx(7.65)


def test_a_cached_page_needs_no_query(client, scrape, settings, django_assert_num_queries):
    scrape()
    settings.METRICS_CACHE_SECONDS = 60
    scrape()
    with django_assert_num_queries(0):
        assert client.get("/metrics", headers={"Authorization": "Bearer scraper"}).status_code == 200


def test_queues_are_measured(scrape, settings):
    with redis.Redis.from_url(settings.CACHE_REDIS_URL) as client:
        client.rpush("runs", "a", "b", "c")
    shown = scrape()
    assert shown("queue_messages", queue="runs") == 3
    assert {shown("queue_messages", queue=name) for name in ("webhooks", "webhooks-retry", "maintenance")} == {0}


# --- the database ----------------------------------------------------------------------------------------------------
def test_live_runs_by_state(scrape, user):
    now = clock.now()
    chat = factories.ChatFactory(user=user)
    old = now - timedelta(seconds=90)
    factories.RunFactory(chat=chat, status="running", worker_id=new_id("wrk"))
    for _ in range(2):
        factories.RunFactory(chat=chat, status="queued", blocked=True, updated_at=old - timedelta(days=1))
    factories.RunFactory(chat__user=user, status="queued", throttled=True, updated_at=old - timedelta(days=1))
    factories.RunFactory(chat__user=user, status="queued", updated_at=old, due_at=now)
    factories.RunFactory(chat__user=user, status="queued", updated_at=now, due_at=now)
    factories.RunFactory(chat__user=user, status="waiting", updated_at=old - timedelta(days=1))
    factories.RunFactory(chat__user=user, status="completed")
    factories.RunFactory(chat__user=user, status="running", parked=True, updated_at=old - timedelta(days=1))
    factories.RunFactory(chat__user=user, status="running", parked=True, throttled=True)  # waits for a place
    shown = scrape()
    names = ("queued", "in_line", "throttled", "running", "parked", "waiting")
    states = {state: shown("runs", state=state) for state in names}
    assert states == {"queued": 2, "in_line": 2, "throttled": 2, "running": 1, "parked": 1, "waiting": 1}
    assert 90 <= shown("runs_oldest_queued_seconds") < 150


def test_due_deliveries(scrape, user):
    now = clock.now()
    endpoint = factories.EndpointFactory(user=user)
    for age in (30, 20, -60):
        factories.DeliveryFactory(
            endpoint=endpoint, status="PENDING", finished_at=None, next_attempt_at=now - timedelta(seconds=age)
        )
    factories.DeliveryFactory(endpoint=endpoint)
    shown = scrape()
    assert shown("webhook_deliveries_due") == 2
    assert 30 <= shown("webhook_oldest_due_seconds") < 90


@pytest.mark.skipif("connection.vendor != 'postgresql'", reason="about PostgreSQL's plans")
def test_a_scrape_does_not_scan_finished_runs(user):
    chat = factories.ChatFactory(user=user)
    with connection.cursor() as cursor:
        cursor.execute(
            """
            INSERT INTO runs_run (id, chat_id, user_id, status, blocked, throttled, user_message_id, request_id,
                tool_invocation_count, last_stream_index, unrecorded_text, ran_ms, lease_token, lease_losses, due_at,
                input_tokens, cached_input_tokens, output_tokens, turn_count, model_retries, metadata,
                waits_for_credits, parked, client_tools)
            SELECT 'run_' || n, %s, %s, 'completed', false, false, 'msg', '', 0, 0, false, 0, 0, 0, NULL, 0, 0, 0, 0, 0,
                '{}', false, false, '[]'
            FROM generate_series(1, 20000) n
            """,
            [chat.pk, user.pk],
        )
        cursor.execute("ANALYZE runs_run")
    asked: list[str] = []

    def explain(execute, sql, params, many, context):
        with connection.connection.cursor() as plain:
            plain.execute("EXPLAIN " + sql, params)
            asked.append("\n".join(row[0] for row in plain.fetchall()))
        return execute(sql, params, many, context)

    with connection.execute_wrapper(explain):
        list(gauges())
    about_runs = [plan for plan in asked if "runs_run" in plan]
    assert len(about_runs) == 7
    for plan in about_runs:
        assert "Seq Scan" not in plan, plan


@pytest.mark.skipif("connection.vendor != 'postgresql'", reason="about PostgreSQL's plans")
def test_an_index_alone_counts_the_runs_that_wait(user):
    chat = factories.ChatFactory(user=user)
    for fields in ({"status": "waiting"}, {"status": "queued", "throttled": True, "due_at": None}):
        factories.RunFactory.create_batch(30, chat__user=user, **fields)
    factories.RunFactory.create_batch(30, chat=chat, status="queued", blocked=True)
    with plans_of("runs_run") as plans:
        shown = {(sample.labels["state"],): sample.value for sample in next(iter(gauges())).samples}
    assert [shown[state,] for state in ("waiting", "throttled", "in_line")] == [30, 30, 30]
    counting = [plan for plan in plans.texts if "actual rows=30" in plan]
    assert len(counting) == 3
    for plan in counting:
        assert "Index Only Scan" in plan, plan
    assert not any("Removed by Filter" in plan for plan in plans.texts)


# --- credits and housekeeping ----------------------------------------------------------------------------------------
@pytest.mark.django_db(transaction=True)
def test_credits_are_counted_once_they_are_spent(scrape, user):
    run = factories.RunFactory(chat__user=user)
    call = new_id("inv")
    ledger.hold(
        user.pk, 5_000_000, invocation_id=call, tool_key="calculate", chat_id=run.chat_id, run_id=run.pk, price={}
    )
    for _ in range(2):  # a repetition changes nothing
        ledger.capture(call, 1_500_000)
        factories.charge_turn(user, 250_000, run=run.pk, chat=run.chat_id, index=1)
    shown = scrape()
    assert shown("credits_spent_total", tool="calculate") == 1.5
    assert shown("credits_spent_total", tool="model") == 0.25


@pytest.mark.django_db(transaction=True)
def test_turns_that_cost_more_than_their_hold_are_counted(scrape, user):
    """At most the hold is spent. A call's cost is not the provider's, so a call above its hold is no such turn."""
    run = factories.RunFactory(chat__user=user)
    about = {"chat_id": run.chat_id, "run_id": run.pk, "price": {}}
    ledger.hold(user.pk, 1_000_000, invocation_id="inv_1", tool_key="calculate", **about)
    ledger.capture("inv_1", 1_500_000)
    hold = ledger.hold(user.pk, 1_000_000, cause="turn", **about)
    for _ in range(2):
        ledger.settle(hold, 1_500_000, price={})
    shown = scrape()
    assert shown("credits_turns_over_hold_total") == 1
    assert shown("credits_spent_total", tool="calculate") == shown("credits_spent_total", tool="model") == 1


@pytest.mark.django_db(transaction=True)
def test_every_scheduled_job_reports_its_result(scrape, limits):
    celery.app.loader.import_default_modules()
    for entry in project.CELERY_BEAT_SCHEDULE.values():
        celery.app.tasks[entry["task"]].apply(throw=True)
    shown = scrape()
    for job in project.CELERY_BEAT_SCHEDULE:
        # An increase from nothing to 1 is none for Prometheus.
        assert shown("housekeeping_failures_total", job=job) == shown("housekeeping_rows_failed_total", job=job) == 0
        assert shown("housekeeping_rows_total", job=job) == 0, job
        age = clock.now().timestamp() - shown("housekeeping_last_success_timestamp_seconds", job=job)
        assert 0 <= age < 60, job


def test_a_failed_job_is_counted_as_a_failure_only(scrape):
    def fail(error: Exception) -> int:
        raise error

    with pytest.raises(RuntimeError):
        jobs.run("test-job", lambda: fail(RuntimeError()))
    assert jobs.run("test-job", lambda: fail(OperationalError())) == 0
    shown = scrape()
    assert shown("housekeeping_failures_total", job="test-job") == 2
    assert shown("housekeeping_last_success_timestamp_seconds", job="test-job") is None
