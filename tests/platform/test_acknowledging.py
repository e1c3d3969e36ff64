"""config.celery.SparingQoS: it sends no acknowledgement to Redis for queues that need none."""

from collections.abc import Iterator
from unittest.mock import patch

import pytest
from kombu import Connection, Exchange, Queue
from kombu.transport.redis import Channel, QoS

from config.celery import SparingQoS
from tests.stack.redis import RedisServer

pytestmark = [pytest.mark.services, pytest.mark.slow]
MESSAGES = 20


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """A separate Redis server, as the test reads the server's statistics."""
    with RedisServer() as running:
        yield running


def removals(server: RedisServer, qos: type[QoS], *, no_ack: bool) -> int:
    """Send MESSAGES and acknowledge each. Returns the number of HDEL commands that Redis counted."""
    exchange = Exchange("acknowledging")
    queue = Queue("acknowledging", exchange, routing_key="acknowledging", no_ack=no_ack)
    received: list[object] = []

    def receive(body, message):
        message.ack()
        received.append(body)

    with patch.object(Channel, "QoS", qos), Connection(server.url()) as connection:
        producer = connection.Producer()
        with connection.Consumer([queue], callbacks=[receive]):
            for number in range(MESSAGES):
                producer.publish({"number": number}, exchange=exchange, routing_key=queue.routing_key)
            while len(received) < MESSAGES:
                connection.drain_events(timeout=5)
        client = connection.default_channel.client
        assert client.hlen("unacked") == 0
        return client.info("commandstats").get("cmdstat_hdel", {"calls": 0})["calls"]


def test_messages_that_need_none_are_not_acknowledged(server):
    assert removals(server, SparingQoS, no_ack=True) == 0


def test_messages_that_need_it_are_acknowledged(server):
    assert removals(server, SparingQoS, no_ack=False) == MESSAGES


def test_kombu_acknowledges_all_messages(server):
    """If this fails, kombu has changed: SparingQoS may no longer be needed."""
    assert removals(server, QoS, no_ack=True) == MESSAGES
