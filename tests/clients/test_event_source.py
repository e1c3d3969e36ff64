"""The npm package "eventsource" follows a run and stops at its end, on both servers of streams."""

import json
from collections.abc import Iterator

import pytest

from tests.clients.conftest import NpmFolder
from tests.driver import Driver
from tests.stack.plugin import given_services
from tests.streams.conftest import StreamStack

pytestmark = [pytest.mark.stack, pytest.mark.services, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def streams() -> Iterator[StreamStack]:
    with StreamStack(**given_services()) as running:
        yield running


@pytest.mark.parametrize("server", ["web", "stream"])
def test_it_stops_at_the_end_of_the_run(streams: StreamStack, npm: NpmFolder, server: str) -> None:
    base = {"web": streams.url, "stream": streams.stream_url}[server]
    driver = Driver(streams.public("ada"))
    run = driver.start("/stream 20 50\n/say over")
    url = f"{base}/api/public/v1/runs/{run['id']}/stream"
    said = json.loads(npm.run("node", "event_source.mjs", url, streams.api_key("ada")))
    last = driver.get(run["id"])["lastStreamIndex"]
    ids = [int(event["id"]) for event in said["received"]]
    assert ids == list(range(1, last + 1))
    assert said["received"][-1]["data"]["status"] == "completed"
    assert said["answers"] == [{"after": None, "status": 200}, {"after": str(last), "status": 204}]
    assert said["code"] == 204
