"""What follows a failed request, and how the places of a provider are shared: rules without a database."""

import random
from typing import Any

import pytest

from runs.catalogue.definitions import Server
from runs.errors import FailureReason
from runs.llm import limits, refusals
from runs.llm.base import ModelError
from runs.llm.limits import share_out

PASSING = FailureReason.PROVIDER_UNAVAILABLE
REFUSAL = FailureReason.REQUEST_REFUSED
NOTHING = ("", 0.0)


def following(reason: FailureReason, asked: list[str], chain: list[str], left: float = 100.0, **fields: float):
    return refusals.next_model(ModelError(reason, **fields), asked, chain, left)


def test_the_backoff_doubles_with_full_jitter(monkeypatch, settings):
    settings.MODEL_ATTEMPTS = 6
    monkeypatch.setattr("runs.llm.refusals.MODEL_RETRY_SECONDS", 0.5)
    monkeypatch.setattr("runs.llm.refusals.MODEL_RETRY_AFTER_MAX_SECONDS", 3.0)
    for tries, longest in enumerate((0.5, 1.0, 2.0, 3.0, 3.0), 1):
        waits = [following(PASSING, ["a"] * tries, [])[1] for _ in range(2000)]
        assert 0 <= min(waits) < longest * 0.05
        assert longest * 0.95 < max(waits) <= longest


def test_a_wait_that_the_provider_asks_for_has_a_limit(monkeypatch):
    monkeypatch.setattr("runs.llm.refusals.MODEL_RETRY_AFTER_MAX_SECONDS", 60)
    given = (0.0, 7.5, 60.0, 1e9)
    assert [following(PASSING, ["a"], [], retry_after=after)[1] for after in given] == [0.0, 7.5, 60.0, 60.0]


def test_which_model_follows(settings, monkeypatch):
    settings.MODEL_ATTEMPTS = 2
    monkeypatch.setattr("runs.llm.refusals.MODEL_RETRY_SECONDS", 0)
    assert following(PASSING, ["a"], ["a", "b"]) == ("a", 0.0)
    assert following(PASSING, ["a", "a"], ["a", "b"]) == ("b", 0.0)
    assert following(REFUSAL, ["a"], ["a", "b"]) == ("b", 0.0)
    assert following(REFUSAL, ["a", "b"], ["a", "b"]) == NOTHING
    assert following(PASSING, ["a", "a", "b"], ["a", "b"]) == ("b", 0.0)
    assert following(PASSING, ["a", "a", "b", "b"], ["a", "b"]) == NOTHING
    assert following(PASSING, ["gone", "gone"], []) == NOTHING
    # A wait that is too long for the run is not begun.
    assert following(PASSING, ["a"], ["a"], left=5.0, retry_after=5.0) == NOTHING
    assert following(PASSING, ["a"], ["a", "b"], left=5.0, retry_after=5.0) == ("b", 0.0)
    assert following(PASSING, ["a"], ["a", "b"], left=0.0) == NOTHING


class Installation:
    """Processes that share the places of one provider, with a clock of their own."""

    def __init__(self, **limits: int) -> None:
        self.server = Server("test", "openai", **limits)
        self.document: dict[str, Any] = {}
        self.now = 1_000_000.0
        self.working: dict[str, list[str]] = {}
        self.waiting: dict[str, list[str]] = {}
        self.begun: list[str] = []

    def ask(self, process: str, *users: str) -> list[str]:
        """More requests of ``users`` wait in the process, which asks for places. Returns whose requests may begin."""
        waiting = self.waiting.setdefault(process, [])
        working = self.working.setdefault(process, [])
        waiting += users
        demand = process, len(working), {user: waiting.count(user) for user in waiting}
        self.document, granted = share_out(self.document, self.server, *demand, self.now)
        begin = [user for user, count in granted.items() for _ in range(count)]
        for user in begin:
            waiting.remove(user)
        working += begin
        self.begun += begin
        return begin

    def end(self, process: str, user: str) -> None:
        self.working[process].remove(user)

    @property
    def at_work(self) -> int:
        return sum(map(len, self.working.values()))


def test_places_are_those_of_all_processes():
    installation = Installation(max_concurrent=3)
    assert installation.ask("p1", *["ada"] * 5) == ["ada"] * 3
    assert installation.ask("p2", *["bob"] * 5) == []
    installation.end("p1", "ada")
    assert installation.ask("p1") == ["ada"]
    installation.end("p1", "ada")
    # The free place is Bob's, who waits in the other process.
    assert installation.ask("p1") == []
    assert installation.ask("p2") == ["bob"]
    assert installation.at_work == 3


@pytest.mark.parametrize("processes", [("p1", "p1"), ("p1", "p2")])
def test_a_user_with_many_requests_delays_another_by_one_place(processes):
    greedy, modest = processes
    installation = Installation(max_concurrent=1)
    installation.ask(greedy, *["greedy"] * 100)
    for _ in range(5):
        before = len(installation.begun)
        installation.ask(modest, "modest")
        while "modest" not in installation.begun[before:]:
            if "greedy" in installation.working[greedy]:
                installation.end(greedy, "greedy")
            for process in {*processes}:
                installation.ask(process)
        assert installation.begun[before:] in (["modest"], ["greedy", "modest"])
        installation.end(modest, "modest")


def test_users_take_turns():
    installation = Installation(max_concurrent=4)
    first = installation.ask("p1", *["a"] * 10, *["b"] * 10, *["c"] * 10)
    assert sorted(first) in (["a", "a", "b", "c"], ["a", "b", "b", "c"], ["a", "b", "c", "c"])
    for _ in range(8):
        for user in list(installation.working["p1"]):
            installation.end("p1", user)
        installation.ask("p1")
    counts = [installation.begun.count(user) for user in "abc"]
    assert sum(counts) == 30
    assert max(counts) - min(counts) <= 1


def test_the_rate_holds_in_every_window():
    random.seed(7)
    installation = Installation(requests_per_minute=10)
    times: list[float] = []
    for _ in range(2000):
        installation.now += random.uniform(0, 0.4)
        process = random.choice(("p1", "p2"))
        began = installation.ask(process, "ada")
        times += [installation.now] * len(began)
        for user in began:
            installation.end(process, user)
    for start in times:
        assert sum(start <= other < start + limits.WINDOW_SECONDS for other in times) <= 10
    # It is also used up: no more than the second of a bucket is lost in a window.
    assert len(times) >= 10 * (int((installation.now - 1_000_000) / (limits.WINDOW_SECONDS + 1.5)))


def test_the_places_of_a_lost_process_are_free_after_its_lease(monkeypatch):
    monkeypatch.setattr("runs.llm.limits.MODEL_PLACES_LEASE_SECONDS", 20)
    monkeypatch.setattr("runs.llm.limits.MODEL_PLACES_POLL_SECONDS", 0.1)
    installation = Installation(max_concurrent=2)
    installation.ask("lost", *["ada"] * 4)
    assert installation.ask("p2", "bob") == []
    installation.now += 19.9
    assert installation.ask("p2") == []
    installation.now += 0.2
    assert installation.ask("p2", "bob") == ["bob", "bob"]


def test_a_lost_process_that_waited_keeps_nobody_waiting(monkeypatch):
    monkeypatch.setattr("runs.llm.limits.MODEL_PLACES_POLL_SECONDS", 0.1)
    installation = Installation(max_concurrent=1)
    installation.ask("p2", "bob")
    installation.ask("lost", "ada")
    installation.end("p2", "bob")
    assert installation.ask("p2", "bob") == []  # Ada's turn
    installation.now += limits.VALID_POLLS * 0.1 + 0.01
    assert installation.ask("p2") == ["bob"]


def test_a_lost_document_is_said_again():
    installation = Installation(max_concurrent=2)
    installation.ask("p1", "ada", "ada", "ada")
    installation.document = {}
    assert installation.ask("p1") == []
    assert installation.ask("p2", "bob") == []


def test_a_lost_answer_loses_no_place():
    """The process never learned of its place, and says again that none of its requests is at work."""
    installation = Installation(max_concurrent=1)
    demand = "p1", 0, {"ada": 1}
    installation.document, granted = share_out({}, installation.server, *demand, installation.now)
    assert granted == {"ada": 1}
    assert installation.ask("p2", "bob") == []
    installation.document, granted = share_out(installation.document, installation.server, *demand, installation.now)
    assert granted == {}  # it is Bob's turn now
    assert installation.ask("p2") == ["bob"]


def test_a_limit_that_is_lowered_holds_for_what_begins_next():
    installation = Installation(max_concurrent=4)
    installation.ask("p1", *["ada"] * 6)
    installation.server = Server("test", "openai", max_concurrent=2)
    for still_working in (3, 2):
        installation.end("p1", "ada")
        assert installation.ask("p1") == []
        assert installation.at_work == still_working
    installation.end("p1", "ada")
    assert installation.ask("p1") == ["ada"]
