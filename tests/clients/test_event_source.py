"""The npm package "eventsource" follows a run and stops at its end."""

import json

import pytest

from tests.clients.conftest import NpmFolder
from tests.driver import Driver
from tests.stack.stack import Stack

pytestmark = [pytest.mark.stack, pytest.mark.services, pytest.mark.timeout(600)]


def test_it_stops_at_the_end_of_the_run(stack: Stack, npm: NpmFolder) -> None:
    driver = Driver(stack.public("ada"))
    run = driver.start("/stream 20 50\n/say over")
    url = f"{stack.url}/api/public/v1/runs/{run['id']}/stream"
    said = json.loads(npm.run("node", "event_source.mjs", url, stack.api_key("ada")))
    last = driver.get(run["id"])["lastStreamIndex"]
    ids = [int(event["id"]) for event in said["received"]]
    assert ids == list(range(1, last + 1))
    assert said["received"][-1]["data"]["status"] == "completed"
    assert said["answers"] == [{"after": None, "status": 200}, {"after": str(last), "status": 204}]
    assert said["code"] == 204
