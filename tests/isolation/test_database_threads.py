"""Database threads of a run worker: a user whose claims or steps wait for locks does not delay other users' runs."""

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from tests.driver import FINAL, Driver, until
from tests.faults.load import require_correct_data
from tests.isolation.compare import assert_isolated
from tests.streams.conftest import StreamStack
from tests.webhooks.receiver import Receiver, answer, held

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.services, pytest.mark.timeout(300)]

# As many as run at the same time (RUN_USER_LIMIT), and more than a worker has database threads.
RUNS = 20
SCRIPT = "/call look_up {}\n/say done"
USER = "SELECT FROM auth_user WHERE username = %s FOR NO KEY UPDATE"
LIVE_RUNS = (
    "SELECT FROM runs_run WHERE status = 'running' AND user_id = (SELECT id FROM auth_user WHERE username = %s)"
    " FOR NO KEY UPDATE"
)
WAITS = "SELECT count(*) > 0 FROM pg_stat_activity WHERE %s = ANY(pg_blocking_pids(pid))"


@pytest.mark.parametrize("waiting", ["claims", "steps"])
def test_runs_that_wait_for_locks_do_not_delay_other_users(stack: StreamStack, tools: Receiver, waiting: str) -> None:
    name = f"greedy-{waiting}"
    greedy, modest = Driver(stack.session(name)), Driver(stack.session(f"modest-{waiting}"))
    chats = [greedy.chat() for _ in range(RUNS)]
    address = stack.environment["DATABASE_URL"]
    done: list[str] = []

    def start() -> list[str]:
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(lambda chat: greedy.start(SCRIPT, chat)["id"], chats))

    @contextlib.contextmanager
    def locked() -> Iterator[None]:
        """The greedy user's claims wait for the user's row, or all steps after the tool calls wait for the runs."""
        with psycopg.connect(address) as holder, psycopg.connect(address, autocommit=True) as watcher:
            if waiting == "claims":
                tools.behaviours = [answer()]
                holder.execute(USER, [name])
                runs = start()
            else:
                release = threading.Event()
                tools.behaviours = [held(release)]
                runs = start()
                until(lambda: tools.under_way == RUNS)
                holder.execute(LIVE_RUNS, [name])
                release.set()
            until(lambda: watcher.execute(WAITS, [holder.info.backend_pid]).fetchone() == (True,))
            yield
            assert not any(greedy.get(run)["status"] in FINAL for run in runs), "the runs did not wait"
        done.extend(run for run in runs if greedy.wait(run)["status"] == "completed")

    assert_isolated(lambda: modest.finish("Hello"), locked)
    assert len(done) == RUNS
    require_correct_data(stack)
