"""Limits of a provider: who waits for a place, how, and what ends the wait. tests/faults has several real workers."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection

from runs import catalogue
from runs.catalogue.definitions import Server
from runs.errors import FailureReason
from runs.llm import limits as limits_of_providers
from runs.llm.base import ModelError
from runs.llm.demo import DemoModel
from runs.models import AgentModel, ModelAttempt, Provider, ProviderUse, Run
from tests import factories
from tests.driver import Driver, InProcess, until
from tests.lifecycle.conftest import Bench, vanish
from tests.operations.conftest import limits, redis_server, scrape  # noqa: F401
from tests.tiers import slow

pytestmark = pytest.mark.django_db(transaction=True)


class Requests:
    """The requests that the demo model gets: when and for whom each began, and how many are at work."""

    def __init__(self) -> None:
        self.begun: list[tuple[float, str]] = []
        self.at_work = self.most_at_work = 0
        self.error: ModelError | None = None

    async def stream(self, model: DemoModel, request: Any, original: Callable[..., Any]) -> Any:
        self.begun.append((time.monotonic(), request.chat_id))
        self.at_work += 1
        self.most_at_work = max(self.most_at_work, self.at_work)
        try:
            if self.error is not None:
                error, self.error = self.error, None
                raise error
            async for event in original(model, request):
                yield event
        finally:
            self.at_work -= 1

    @property
    def runs(self) -> list[str]:
        of_chats = dict(Run.objects.values_list("chat_id", "pk"))
        return [of_chats[chat_id] for _, chat_id in self.begun]


@pytest.fixture
def asked(monkeypatch, settings) -> Requests:
    settings.RUN_USER_LIMIT = 0
    monkeypatch.setattr("runs.llm.limits.MODEL_PLACES_POLL_SECONDS", 0.05)
    requests, original = Requests(), DemoModel.stream
    monkeypatch.setattr(DemoModel, "stream", lambda self, request: requests.stream(self, request, original))
    return requests


def limit(**columns: int | None) -> None:
    Provider.objects.filter(name="demo").update(**columns)
    catalogue.refresh()


def waiting(bench: Bench) -> int:
    return sum(provider.waiting for provider in bench.engine.process.model_places.providers.values())


def test_requests_at_the_same_time_are_limited(bench, asked):
    limit(max_concurrent=2)
    runs = [bench.start("/wait 0.15\n/say done")["id"] for _ in range(8)]
    assert {bench.wait(run_id)["status"] for run_id in runs} == {"completed"}
    assert asked.most_at_work == 2
    assert sorted(asked.runs) == sorted(runs)


@pytest.mark.slow
def test_requests_in_a_window_are_limited(bench, asked, monkeypatch):
    monkeypatch.setattr("runs.llm.limits.WINDOW_SECONDS", 2)
    limit(requests_per_minute=3)
    runs = [bench.start("/say done")["id"] for _ in range(7)]
    assert {bench.wait(run_id)["status"] for run_id in runs} == {"completed"}
    times = [begun for begun, _ in asked.begun]
    for start in times:
        assert sum(start <= other < start + 1.9 for other in times) <= 3


def test_a_provider_without_limits_lets_all_through(bench, asked):
    runs = [bench.start("/wait 60")["id"] for _ in range(6)]
    until(lambda: asked.at_work == 6)
    assert not ProviderUse.objects.exists()
    for run_id in runs:
        bench.cancel(run_id)
    assert [bench.wait(run_id)["status"] for run_id in runs] == ["cancelled"] * 6


def test_runs_that_wait_for_their_users_memory_hold_no_place(bench, asked, user, settings, monkeypatch):
    """The files are read before the place is taken, so that another user's run has it."""
    limit(max_concurrent=2)
    monkeypatch.setattr(DemoModel, "reads_files", True)
    memory = bench.engine.process.attachment_bytes
    memory.per_user = 10
    files = [factories.AttachmentFactory(user=user, content=b"0123456789").pk for _ in range(2)]
    first, second = (bench.start("/wait 60", attachmentIds=[file])["id"] for file in files)
    until(lambda: (asked.at_work, memory.waiting) == (1, 1))
    other = Driver(InProcess(factories.session_client(factories.UserFactory())))
    assert other.wait(other.start("/say done")["id"])["status"] == "completed"
    bench.cancel(first)
    until(lambda: (asked.at_work, memory.waiting) == (1, 0))
    bench.cancel(second)
    assert bench.wait(second)["status"] == "cancelled"


@pytest.mark.slow
def test_many_waiting_runs_delay_another_users_run_by_one_place(bench, asked):
    limit(max_concurrent=1)
    first = bench.start("/wait 60")["id"]
    until(lambda: asked.at_work == 1)
    greedy = [bench.start("/wait 0.1")["id"] for _ in range(15)]
    until(lambda: waiting(bench) == 15)
    modest = Driver(InProcess(factories.session_client(factories.UserFactory())))
    run_id = modest.start("/say done")["id"]
    until(lambda: waiting(bench) == 16)
    bench.cancel(first)
    assert modest.wait(run_id)["status"] == "completed"
    assert asked.runs.index(run_id) <= 2, "after the first run and one of the others"
    for other in greedy:
        bench.cancel(other)
    assert {bench.wait(other)["status"] for other in greedy} <= {"completed", "cancelled"}


def test_a_cancel_ends_the_wait(bench, asked):
    limit(max_concurrent=1)
    first = bench.start("/wait 30")["id"]
    until(lambda: asked.at_work == 1)
    second, third = (bench.start("/say done")["id"] for _ in range(2))
    until(lambda: waiting(bench) == 2)
    begun = time.monotonic()
    bench.cancel(second)
    assert bench.wait(second)["status"] == "cancelled"
    assert time.monotonic() - begun < 1.0
    bench.cancel(first)
    assert bench.wait(third)["status"] == "completed"
    assert second not in asked.runs


@pytest.mark.slow
def test_a_run_waits_without_thread_and_connection(bench, asked, settings):
    limit(max_concurrent=1)
    first = bench.start("/wait 60")["id"]
    until(lambda: asked.at_work == 1)
    threads = threading.active_count()
    runs = [bench.start("/say done")["id"] for _ in range(30)]
    until(lambda: waiting(bench) == 30)
    # The database's threads start when they are first used.
    assert threading.active_count() <= threads + settings.RUN_WORKER_DB_THREADS
    assert bench.finish("/say done", model=unlimited())["status"] == "completed"
    for run_id in [*runs, first]:
        bench.cancel(run_id)
    assert {bench.wait(run_id)["status"] for run_id in runs} <= {"cancelled", "completed"}


def unlimited() -> str:
    """A model of another provider."""
    provider = Provider.objects.create(name="other", kind="demo")
    columns = {"display_name": "Other", "provider_model": "demo", "price_in": 0, "price_out": 0}
    AgentModel.objects.create(name="other", provider=provider, **columns)
    catalogue.refresh()
    return "other"


def test_a_run_that_waits_for_a_retry_has_no_place(bench, asked):
    limit(max_concurrent=1)
    asked.error = ModelError(FailureReason.PROVIDER_RATE_LIMITED, status=429, retry_after=50.0)
    first = bench.start("/say done")["id"]
    until(ModelAttempt.objects.exists)
    assert bench.finish("/say done")["status"] == "completed"
    bench.cancel(first)
    bench.wait(first)


@pytest.mark.slow
def test_the_wait_does_not_count_as_time_of_the_model(bench, asked, settings):
    limit(max_concurrent=1)
    settings.MODEL_TIMEOUT_SECONDS = 1.0
    runs = [bench.start("/wait 0.8\n/say done")["id"] for _ in range(3)]
    assert {bench.wait(run_id)["status"] for run_id in runs} == {"completed"}


def test_the_runs_time_ends_the_wait(bench, asked, settings):
    limit(max_concurrent=1)
    first = bench.start("/wait 30")["id"]
    until(lambda: asked.at_work == 1)
    settings.RUN_TIMEOUT_SECONDS = 1.0
    run = bench.finish("/say done")
    assert (run["status"], run["errorCode"]) == ("failed", "RUN_TIMEOUT")
    assert run["totalCreditsUsed"] == 0
    bench.cancel(first)
    bench.wait(first)
    until(lambda: waiting(bench) == 0)


@pytest.mark.slow
def test_a_shutdown_hands_over_the_runs_that_wait_and_frees_the_places(bench, asked, engines):
    limit(max_concurrent=1)
    runs = [bench.start("/wait 3")["id"]]
    until(lambda: asked.at_work == 1)
    runs += [bench.start("/say done")["id"] for _ in range(3)]
    until(lambda: waiting(bench) == 3)
    engines()
    begun = time.monotonic()
    bench.engine.drain()
    until(lambda: len(bench.engine.tasks) <= 1)
    assert time.monotonic() - begun < 2
    bench.engine.stop(0)
    begun = time.monotonic()
    assert {bench.wait(run_id)["status"] for run_id in runs} == {"completed"}
    assert time.monotonic() - begun < 10, "the next worker waited for the lease of the places"
    assert asked.most_at_work == 1


@pytest.mark.slow
def test_the_places_of_a_lost_worker_are_free_after_their_lease(bench, asked, engines, monkeypatch):
    monkeypatch.setattr("runs.llm.limits.MODEL_PLACES_LEASE_SECONDS", 2)
    limit(max_concurrent=1)
    run = bench.start("/wait 1\n/say done")
    until(lambda: asked.at_work == 1)
    vanish(bench.engine)
    engines()
    assert bench.wait(run["id"])["status"] == "completed"


@pytest.mark.slow
def test_a_place_is_kept_for_longer_than_its_lease(bench, asked, engines, monkeypatch):
    """The worker renews it, although nothing else happens there."""
    monkeypatch.setattr("runs.llm.limits.MODEL_PLACES_LEASE_SECONDS", 1)
    limit(max_concurrent=1)
    first = bench.start("/wait 3\n/say done")["id"]
    until(lambda: asked.at_work == 1)
    engines()  # gets the next run
    second = bench.start("/say done")["id"]
    assert {bench.wait(run_id)["status"] for run_id in (first, second)} == {"completed"}
    assert asked.most_at_work == 1


@pytest.mark.parametrize("columns", [{"max_concurrent": 5}, *slow({"max_concurrent": None})])
def test_a_change_of_the_limit_reaches_runs_that_wait(bench, asked, columns):
    limit(max_concurrent=1)
    runs = [bench.start("/wait 1")["id"] for _ in range(5)]
    until(lambda: waiting(bench) == 4)
    limit(**columns)
    until(lambda: asked.at_work == 5, timeout=5)
    assert {bench.wait(run_id)["status"] for run_id in runs} == {"completed"}


@pytest.mark.slow
def test_places_are_asked_for_again_after_an_error(bench, asked, monkeypatch):
    """A locked row of the provider delays its runs, and only these."""
    limit(max_concurrent=1)
    take, failures = limits_of_providers.take, []

    def fail_twice(*args: Any) -> Any:
        if len(failures) < 2:
            failures.append(1)
            raise ZeroDivisionError
        return take(*args)

    monkeypatch.setattr(limits_of_providers, "take", fail_twice)
    assert bench.finish("/say done")["status"] == "completed"
    assert len(failures) == 2


def test_the_metrics_show_who_works_and_who_waits(bench, asked, scrape):  # noqa: F811
    limit(max_concurrent=1)
    runs = [bench.start("/wait 30")["id"] for _ in range(3)]
    until(lambda: asked.at_work == 1 and waiting(bench) == 2)
    shown = scrape()
    assert shown("model_requests_open", provider="demo", state="working") == 1
    assert shown("model_requests_open", provider="demo", state="waiting") == 2
    for run_id in reversed(runs):
        bench.cancel(run_id)
    assert {bench.wait(run_id)["status"] for run_id in runs} == {"cancelled"}


def test_the_document_is_locked_while_it_changes(transactional_db):
    """Many threads state their demand at once: no place is given twice."""
    server = Server("busy", "demo", max_concurrent=3)
    granted: list[int] = []

    def ask(number: int) -> None:
        granted.append(sum(limits_of_providers.take(server, f"p{number}", 0, {f"u{number}": 2}).values()))
        connection.close()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(granted) == 6
    document = ProviderUse.objects.get().document
    working = [said["working"] for said in document["processes"].values()]
    assert sum(working) == sum(granted) <= 3
