"""A service with one process of each kind, which all tests of this folder share. Each test has its own users."""

from collections.abc import Iterator

import pytest

from tests.faults.load import CATALOGUE
from tests.stack.plugin import given_services
from tests.streams.conftest import StreamStack
from tests.webhooks.receiver import Receiver, receiving

RUN_QUEUE_MAX = 5
HEAD_SECONDS, BODY_SECONDS = 8, 8
ENVIRONMENT = {
    "RUN_QUEUE_MAX": str(RUN_QUEUE_MAX),
    "SIGNUP_CREDITS": "100000",
    # Little more than the places of one user, so that a user without a limit would leave none for others.
    "STREAM_CONNECTIONS_MAX": "60",
    "config.serve.__main__.HEAD_SECONDS": str(HEAD_SECONDS),
    "config.serve.requests.BODY_SECONDS": str(BODY_SECONDS),
    "webhooks.claims.WEBHOOK_WORKER_CAPACITY": "16",
}


@pytest.fixture(scope="package")
def tools() -> Iterator[Receiver]:
    """The server of the tool ``look_up``."""
    with receiving() as receiver:
        yield receiver


@pytest.fixture(scope="package")
def stack(tools: Receiver) -> Iterator[StreamStack]:
    prepare = CATALOGUE.format(url=tools.url)
    with StreamStack(**given_services(), environment=ENVIRONMENT, prepare=prepare) as running:
        yield running
