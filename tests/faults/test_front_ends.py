"""The AI SDK's own chat stays with its answer while the processes behind it are killed."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.clients.conftest import NpmFolder, npm, packages  # noqa: F401
from tests.driver import Driver
from tests.faults.load import RUNS_ALONE
from tests.stack.plugin import given_services
from tests.stack.redis import RedisServer
from tests.stack.stack import Stack

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.services, pytest.mark.timeout(300)]

SHORT_LEASES = {"RUN_LEASE_SECONDS": "2", "config.settings.RUN_SWEEP_SECONDS": "0.5"}


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def stack(redis_server: RedisServer) -> Iterator[Stack]:
    """What all tests of this file share. Each has a user of its own."""
    with Stack(
        **given_services() | {"redis_url": redis_server.url()}, environment=SHORT_LEASES, without=RUNS_ALONE
    ) as running:
        yield running


@pytest.mark.parametrize("victim", ["runs-1", "web", "redis"])
def test_an_answer_outlives_a_killed_process(
    stack: Stack,
    npm: NpmFolder,  # noqa: F811
    redis_server: RedisServer,
    victim: str,
) -> None:
    """The worker is killed in mid-answer, with text that had gone out; the web process that sends the stream; or Redis,
    which is away for a while.
    """
    driver = Driver(stack.session(victim))
    text = '/say First\n/call calculate {"expression": "1+1"}\n/stream 80 40\n/say over'
    order: dict[str, Any] = {"url": f"{stack.url}/api/v1", "token": stack.token(victim)}
    order["plans"] = [
        {"version": version, "id": str(version), "text": text, "reload": reload}
        for version, reload in ((7, False), (6, True))
    ]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(npm.run, "node", "use_chat.mjs", json.dumps(order))
        found = stack.wait_for(lambda: len(runs := driver.http.get("/runs").json()["items"]) == 2 and runs)
        # The second turn's text is under way.
        stack.wait_for(lambda: all(driver.get(run["id"])["lastStreamIndex"] > 12 for run in found))
        if victim == "redis":
            redis_server.kill()
            seen = sum(driver.get(run["id"])["lastStreamIndex"] for run in found)
            stack.wait_for(lambda: sum(driver.get(run["id"])["lastStreamIndex"] for run in found) > seen + 20)
            redis_server.start()
        else:
            stack.kill(victim)
            stack.restart(victim)
        said = json.loads(running.result(120))
    for got in said:
        assert got["listed"]["metadata"]["status"] == "completed"
        assert got["message"] == got["listed"], got["requests"]
        assert got["message"]["parts"][-1]["text"].endswith("over")
        assert victim != "redis" or got["requests"] == ["POST 200"]
    assert len(driver.http.get("/runs").json()["items"]) == 2
