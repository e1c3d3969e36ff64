"""/livez and /readyz (docs/deploy.md)."""

import socket
import threading
from collections.abc import Callable

import pytest
from django.db import OperationalError
from django.db.migrations import Migration

from config.api import probes

pytestmark = pytest.mark.django_db


def test_livez_answers_200(client, monkeypatch):
    monkeypatch.setattr(probes, "ask_database", lambda: pytest.fail("the process alone is asked"))
    response = client.get("/livez")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})


@pytest.mark.django_db(transaction=True)
def test_ready_if_the_database_and_the_broker_answer(client, limits):
    response = client.get("/readyz")
    assert (response.status_code, response.json()) == (
        200,
        {"status": "ok", "checks": {"database": "ok", "migrations": "ok", "broker": "ok"}},
    )
    assert response["Cache-Control"] == "no-store"


def test_without_its_broker_the_service_is_degraded_and_ready(client, settings):
    settings.CACHE_REDIS_URL = "redis://127.0.0.1:1"
    response = client.get("/readyz")
    assert (response.status_code, response.json()) == (
        200,
        {"status": "degraded", "checks": {"database": "ok", "migrations": "ok", "broker": "unavailable"}},
    )


def test_a_broker_that_hangs_does_not_take_the_time_of_the_probe(client, settings, monkeypatch):
    monkeypatch.setattr("config.api.probes.READINESS_TIMEOUT_SECONDS", 30)
    settings.BROKER_TIMEOUT_SECONDS = 30
    with socket.create_server(("127.0.0.1", 0)) as listener:  # accepts connections, never answers
        settings.CACHE_REDIS_URL = f"redis://127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setattr(probes, "BROKER_SECONDS", 0.3)
        response = client.get("/readyz")
    assert (response.status_code, response.json()["status"]) == (200, "degraded")


def test_an_unreachable_database_is_named(client, limits, monkeypatch):
    def away() -> None:
        raise OperationalError("no route to secret-host")

    monkeypatch.setattr(probes, "ask_database", away)
    response = client.get("/readyz")
    assert response.status_code == 503
    assert response.json() == {
        "status": "unavailable",
        "checks": {"database": "unavailable", "migrations": "ok", "broker": "ok"},
    }
    assert "secret" not in response.content.decode()


def pending(names: list[str]) -> Callable[..., list[tuple[Migration, bool]]]:
    return lambda executor, targets: [(Migration(name, "runs"), False) for name in names]


def test_a_database_with_missing_migrations_is_named(client, limits, monkeypatch):
    monkeypatch.setattr(probes, "_migrated", False)
    monkeypatch.setattr(probes.MigrationExecutor, "migration_plan", pending(["1000_new", "1001_new"]))
    response = client.get("/readyz")
    assert response.status_code == 503
    assert response.json()["checks"] == {
        "database": "ok",
        "migrations": "not applied: runs.1000_new, runs.1001_new",
        "broker": "ok",
    }
    monkeypatch.undo()
    assert client.get("/readyz").json()["checks"]["migrations"] == "ok"


def test_applied_migrations_are_not_checked_again(client, limits, monkeypatch):
    client.get("/readyz")
    monkeypatch.setattr(probes, "MigrationExecutor", lambda connection: pytest.fail("it was known"))
    assert client.get("/readyz").json()["checks"]["migrations"] == "ok"


def test_a_hanging_check_is_not_ready_and_adds_no_threads(client, settings, monkeypatch):
    monkeypatch.setattr("config.api.probes.READINESS_TIMEOUT_SECONDS", 0.1)
    free = threading.Event()
    monkeypatch.setattr(probes, "ask_database", lambda: free.wait(30) and None)
    with socket.create_server(("127.0.0.1", 0)) as listener:  # accepts connections, never answers
        settings.CACHE_REDIS_URL = f"redis://127.0.0.1:{listener.getsockname()[1]}"
        settings.BROKER_TIMEOUT_SECONDS = 0.1
        for _ in range(3):
            response = client.get("/readyz")
            checks = response.json()["checks"]
            assert response.status_code == 503
            assert (checks["database"], checks["broker"]) == ("unavailable", "unavailable")
        hanging = [thread for thread in threading.enumerate() if thread.name == "probe-database"]
        assert len(hanging) == 1
    free.set()
    hanging[0].join()


def test_a_result_stays_when_another_client_asks():
    free = threading.Event()
    waits = iter([0, 30])
    probe = probes.Probe("database", lambda: free.wait(next(waits)) and None)
    first = probe.start()
    assert first.result(10) == "ok"
    second = probe.start()
    assert (first.result(0), second.done()) == ("ok", False)
    free.set()
    assert second.result(10) == "ok"


@pytest.mark.parametrize("path", ["/livez", "/readyz"])
def test_a_probe_accepts_only_reading_methods(client, path):
    assert client.post(path).status_code == 405
