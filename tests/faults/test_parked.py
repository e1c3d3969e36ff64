"""Parked calls, while every process of the service is killed at every step of parking, callbacks and resuming."""

import contextlib
import http.client
import json
import os
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests

from tests.driver import FINAL, Driver
from tests.faults.load import QUICK, RUNS_ALONE, Careful, require_correct_data
from tests.stack.plugin import given_services
from tests.stack.stack import Stack
from tests.webhooks.receiver import Receiver, answer, receiving

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.services, pytest.mark.timeout(300)]

PREPARE = """
from runs.models import Tool
for name, repeatable in (("film", False), ("film_again", True)):
    Tool.objects.create(
        name=name, display_name=name, description=name, node_type="http", price=2_000_000, approval="never",
        repeatable=repeatable, url="{url}", cancel_url="{url}", park_seconds=3600,
    )
"""
RESULT = json.dumps({"result": "a film", "creditUsed": 1.5}).encode()
# Where the worker dies, and then the worker that takes the runs over.
WORKER_POINTS = [
    ("after_dispatch", "after_tool"),
    ("committed_call_parked", "before_park_run"),
    ("committed_run_parked", "committed_call_parked"),
]
# PARKED_RUNS=2500 parks 50,000 calls. A user has at most PARKED_CALLS_PER_USER of them.
RUNS, CALLS_EACH, CLIENTS, TIMES = int(os.environ.get("PARKED_RUNS", "8")), 20, 16, 3
RUNS_OF_USER = 1000 // CALLS_EACH
AT_ONCE = 400
# Of a run worker, whatever is parked.
GROWTH_MIB = 10
PARKED = "/runs?awaiting=tool&limit=100"
PROCESSES = ("web", "runs-1", "runs-2", "webhooks", "maintenance", "beat")


@contextlib.contextmanager
def at_work(without: tuple[str, ...] = (), **environment: str) -> Iterator[tuple[Stack, Receiver, Driver]]:
    with receiving(answer(202, b'{"message": "in line"}')) as films:
        prepared = {
            "run_workers": 2,
            "without": without,
            "environment": QUICK | environment,
            "prepare": PREPARE.format(url=films.url),
        }
        with Stack(**{**given_services(), **prepared}) as stack:
            yield stack, films, Driver(Careful(stack.session()))


def addresses(films: Receiver) -> dict[str, str]:
    """The path of the callback by call. A repeated call has the same."""
    found: dict[str, set[str]] = {}
    for request in list(films.requests):
        call = json.loads(request.body)
        if "callback" in call:
            found.setdefault(call["invocationId"], set()).add(urlsplit(call["callback"]["url"]).path)
    assert all(len(paths) == 1 for paths in found.values())
    return {call: min(paths) for call, paths in found.items()}


def call_back(stack: Stack, path: str, body: Any) -> dict[str, Any]:
    """Repeat the callback until it is answered, as a careful tool does."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with contextlib.suppress(requests.RequestException):
            answered = requests.post(stack.url + path, json=body, timeout=10)
            if answered.status_code == 200:
                return dict(answered.json())
            assert answered.status_code == 503, answered.text
        time.sleep(0.2)
    raise AssertionError("no answer to the callback in 60 s")


def check(driver: Driver, runs: list[str], calls: int) -> None:
    """All runs have completed, and each call is charged once."""
    ended = [driver.wait(run, timeout=120) for run in runs]
    assert {run["status"] for run in ended} == {"completed"}, [run for run in ended if run["status"] != "completed"]
    made = [call for run in ended for call in run["toolInvocations"]]
    assert Counter(call["status"] for call in made) == {"COMPLETED": calls}, made
    assert all(call["creditUsed"] == 1.5 for call in made)
    spent = sum(round(run["totalCreditsUsed"] * 1_000_000) for run in ended)
    now = driver.credits()
    assert (now["held"], round(float(now["balance"]) * 1_000_000)) == ("0", 100_000_000_000 - spent)


def die_at(stack: Stack, name: str, point: str) -> None:
    process = stack.processes[name]
    process.kill()
    process.environment["CRASH_POINT"] = point
    process.start()
    process.wanted = False


@pytest.fixture(scope="module")
def service() -> Iterator[tuple[Stack, Receiver]]:
    """What the following tests share. Each has a user of its own."""
    with at_work(without=RUNS_ALONE) as (stack, films, _):
        yield stack, films


def test_callbacks_and_cancels_at_the_same_moment(service: tuple[Stack, Receiver]) -> None:
    stack, films = service
    driver = Driver(Careful(stack.session("canceller")))
    runs = [driver.start("/call film {}\n/call film {}\n/say done")["id"] for _ in range(20)]
    stack.wait_for(lambda: len(addresses(films)) == 40, what="all calls")
    stack.wait_for(lambda: all(driver.get(run)["awaiting"] for run in runs), what="parked calls")
    known = addresses(films)
    work: list[Any] = [lambda run=run: driver.cancel(run) for run in runs]
    for run in runs:
        for call in driver.get(run)["toolInvocations"]:
            work += [lambda path=known[call["id"]]: call_back(stack, path, {"result": 1, "creditUsed": 1.5})] * 3
    with ThreadPoolExecutor(16) as pool:
        # Neighbours are of the same run.
        list(pool.map(lambda at: work[at % len(runs) if at % 7 == 0 else at](), range(len(work))))
        list(pool.map(driver.cancel, runs))
    ended = [driver.wait(run, *FINAL) for run in runs]
    for run in ended:
        used = sum(call["creditUsed"] for call in run["toolInvocations"] if call["status"] == "COMPLETED")
        assert used == 1.5 * sum(call["status"] == "COMPLETED" for call in run["toolInvocations"])
        assert {call["status"] for call in run["toolInvocations"]} <= {"COMPLETED", "FAILED"}
    assert driver.credits()["held"] == "0"
    require_correct_data(stack)


@pytest.mark.parametrize("points", WORKER_POINTS)
def test_a_worker_dies_while_it_parks(service: tuple[Stack, Receiver], points: tuple[str, str]) -> None:
    stack, films = service
    driver = Driver(Careful(stack.session(points[0])))
    stack.kill("runs-2")
    die_at(stack, "runs-1", points[0])
    runs = [driver.start(f"/call {name} {{}}\n/say {{result}}")["id"] for name in ("film", "film_again", "film")]
    stack.wait_for(lambda: not stack.processes["runs-1"].running, 60, f"a worker's death at {points[0]}")
    die_at(stack, "runs-2", points[1])
    if points[1] != "after_tool":  # only a repeatable call reaches it again
        stack.wait_for(lambda: not stack.processes["runs-2"].running, 60, f"a worker's death at {points[1]}")
    del stack.processes["runs-1"].environment["CRASH_POINT"]
    stack.processes["runs-1"].start()
    stack.kill("runs-2")
    stack.wait_for(lambda: {driver.get(run)["awaiting"] for run in runs} == {"tool"}, what="parked calls")
    # The first worker died before or after its requests.
    known = addresses(films)
    calls = [call["id"] for run in runs for call in driver.get(run)["toolInvocations"]]
    for call in calls:
        if call in known:
            assert call_back(stack, known[call], {"result": "a film", "creditUsed": 1.5})["accepted"]
        else:
            stack.manage("callback", call, "--result", "a film")
    ended = [driver.wait(run, timeout=60) for run in runs]
    assert {run["status"] for run in ended} == {"completed"}
    require_correct_data(stack)


@pytest.mark.parametrize("point", ["before_outcome", "committed_outcome"])
def test_the_web_process_dies_during_a_callback(service: tuple[Stack, Receiver], point: str) -> None:
    """The tool gets no answer and repeats the callback. Its outcome counts once, and the run resumes by a sweep."""
    stack, films = service
    driver = Driver(Careful(stack.session(point)))
    run = driver.start("/call film {}\n/say {result}")["id"]
    stack.wait_for(lambda: driver.get(run)["awaiting"] == "tool", what="a parked call")
    (call,) = driver.get(run)["toolInvocations"]
    path = addresses(films)[call["id"]]
    stack.restart("web", environment={"CRASH_POINT": point})
    with pytest.raises(requests.RequestException):
        requests.post(stack.url + path, json={"result": "a film", "creditUsed": 1.5}, timeout=10)
    del stack.processes["web"].environment["CRASH_POINT"]
    stack.restart("web")
    answered = call_back(stack, path, {"result": "another film", "creditUsed": 1.5})
    assert (answered["status"], answered["accepted"]) == ("COMPLETED", point == "before_outcome")
    check(driver, [run], 1)
    require_correct_data(stack)


class ToolClient:
    """Calls back as a tool does that makes many callbacks: on one connection a thread, again until it is answered."""

    def __init__(self, stack: Stack) -> None:
        self.stack, self.local = stack, threading.local()

    def __call__(self, path: str) -> tuple[str, bool]:
        """The call's status, and whether the callback counts."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                if getattr(self.local, "http", None) is None:
                    self.local.http = http.client.HTTPConnection("127.0.0.1", self.stack.port, timeout=30)
                self.local.http.request("POST", path, RESULT, {"Content-Type": "application/json"})
                answered = self.local.http.getresponse()
                body = answered.read()
            except (OSError, http.client.HTTPException):
                self.local.http = None
                time.sleep(0.2)
                continue
            if answered.status == 200:
                said = json.loads(body)
                return said["status"], said["accepted"]
            assert answered.status == 503, body
            time.sleep(0.2)
        raise AssertionError("no answer to the callback in 60 s")


def memory(stack: Stack) -> float:
    """The MiB of the larger run worker; what it shares with other processes is divided among them."""
    rollups = [Path(f"/proc/{stack.processes[name].pid}/smaps_rollup").read_text() for name in ("runs-1", "runs-2")]
    return max(int(re.findall(r"^Pss: +([0-9]+) kB", rollup, re.M)[0]) for rollup in rollups) / 1024


@pytest.mark.timeout(300 + RUNS)
def test_callbacks_from_many_clients_after_all_processes_were_killed() -> None:
    """Each call is called back several times; it is charged once, and its run completes. Parked calls need no memory
    of run workers.
    """
    began = time.monotonic()

    def note(what: str) -> float:
        used = memory(stack)
        print(f"{time.monotonic() - began:.0f} s: {what}; a run worker has {used:.1f} MiB", flush=True)
        return used

    def park(users: list[Driver]) -> None:
        starts = [user for user in users for _ in range(shares[user])]
        with ThreadPoolExecutor(4) as pool:
            for user, run in zip(starts, pool.map(lambda user: user.start(script)["id"], starts), strict=True):
                runs[user].append(run)
        calls = sum(map(len, runs.values())) * CALLS_EACH
        stack.wait_for(lambda: len(films.requests) == calls, 120, "all calls")
        for user in users:
            all_parked = lambda: len(user.http.get(PARKED).json()["items"]) == shares[user]  # noqa: B023, E731
            stack.wait_for(all_parked, 120, "parked runs")

    with at_work(RUN_LEASE_SECONDS="10", WEB_WORKERS="2") as (stack, films, _):
        script = "\n".join(["/call film {}"] * CALLS_EACH) + "\n/say done"
        users = [Driver(Careful(stack.session(f"u{number}"))) for number in range(-(-RUNS // RUNS_OF_USER))]
        shares = {user: len(range(number, RUNS, len(users))) for number, user in enumerate(users)}
        runs: dict[Driver, list[str]] = {user: [] for user in users}
        new = note("all processes are new")
        park(users[:4])
        first = note(f"the first {sum(map(len, runs.values()))} runs are parked")
        for at in range(4, len(users), 4):
            park(users[at : at + 4])
        assert note("all runs are parked") - first < GROWTH_MIB
        for name in PROCESSES:
            stack.kill(name)
        stack.restart(*PROCESSES)
        assert note("all processes were killed and started again") - new < GROWTH_MIB
        paths = list(addresses(films).values())
        assert len(paths) == RUNS * CALLS_EACH
        random.Random(1).shuffle(paths)
        # The callbacks of the first calls come at once, those of the others at any time.
        later = paths[AT_ONCE:] * TIMES
        random.Random(2).shuffle(later)
        order = [path for path in paths[:AT_ONCE] for _ in range(TIMES)] + later
        with ThreadPoolExecutor(CLIENTS) as pool:
            answers = Counter(pool.map(ToolClient(stack), order))
        assert answers == {("COMPLETED", True): len(paths), ("COMPLETED", False): (TIMES - 1) * len(paths)}
        assert note("all callbacks are answered") - first < GROWTH_MIB
        for user in users:
            check(driver=user, runs=runs[user], calls=shares[user] * CALLS_EACH)
        require_correct_data(stack)
        note("all runs are completed and charged once")
