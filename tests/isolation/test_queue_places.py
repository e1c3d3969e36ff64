"""Queue places: a user who fills the queues of many chats does not delay the runs of other users."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.driver import Driver
from tests.faults.load import require_correct_data
from tests.isolation.compare import assert_isolated
from tests.isolation.conftest import RUN_QUEUE_MAX
from tests.streams.conftest import StreamStack

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.services, pytest.mark.timeout(300)]

# More than may run at the same time (RUN_USER_LIMIT): the first runs of the other chats wait for their user's limit.
CHATS = 24


def test_full_queues_of_one_user_do_not_delay_other_users(stack: StreamStack) -> None:
    greedy, modest = Driver(stack.session("greedy-queues")), Driver(stack.session("modest-queues"))

    def enqueue(chat: str, message: str) -> int:
        body = {"message": message, "onActiveRun": "enqueue"}
        return int(greedy.http.post(f"/chats/{chat}/runs", body).status_code)

    def fill(chat: str) -> list[int]:
        """One run that executes or waits for its user's limit, and as many in line as the chat takes."""
        return [enqueue(chat, "/wait 600"), *(enqueue(chat, "Hello") for _ in range(RUN_QUEUE_MAX + 1))]

    @contextlib.contextmanager
    def full() -> Iterator[None]:
        chats = [greedy.chat() for _ in range(CHATS)]
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(fill, chats))
        assert answers == [[201] * (RUN_QUEUE_MAX + 1) + [409]] * CHATS
        yield
        # The queues are still full.
        assert {enqueue(chat, "Hello") for chat in chats} == {409}
        for chat in chats:
            assert greedy.http.delete(f"/chats/{chat}").status_code == 204

    def act() -> None:
        assert modest.finish("Hello")["status"] == "completed"

    assert_isolated(act, full)
    require_correct_data(stack)
