"""One bad or locked row stops neither the sweeps nor other runs, and nothing depends on beat alone."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from tests.faults.load import NOT_NEEDED, QUICK, STREAM, Kind, Load, at_work, require_correct_data

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.services, pytest.mark.timeout(240)]

# 100 words, 50 ms apart.
LONG = Kind("/stream 100 50\n/say and the end", "and the end")
ASK = "/ask Which?"
DELTAS = "SELECT count(*) FROM runs_runevent WHERE run_id = %s AND type = 'message.delta'"
STATUS = "SELECT status FROM runs_run WHERE id = %s"


@pytest.fixture
def make_load() -> Iterator[Callable[..., Load]]:
    with contextlib.ExitStack() as running:
        yield lambda **options: running.enter_context(at_work(**options))


@pytest.fixture(scope="module")
def one_worker() -> Iterator[Load]:
    """What the tests of locks share."""
    with at_work(run_workers=1, without=NOT_NEEDED) as load:
        yield load


@contextlib.contextmanager
def outside(load: Load, query: str, *parameters: Any) -> Iterator[None]:
    """A transaction of another program that holds its locks meanwhile."""
    with psycopg.connect(load.stack.environment["DATABASE_URL"]) as connection:
        assert connection.execute(query, parameters).rowcount
        yield


def deltas(load: Load, run_id: str) -> int:
    return int(load.sql(DELTAS, run_id)[0][0])


def status(load: Load, run_id: str) -> str:
    return str(load.sql(STATUS, run_id)[0][0])


def streamed(load: Load, run_id: str) -> str:
    """The message that the events of the run's stream give together."""
    rows = load.sql("SELECT type, data::json ->> 'text' FROM runs_runevent WHERE run_id = %s ORDER BY index", run_id)
    assert "message.reset" not in [kind for kind, _ in rows]
    return "".join(text for kind, text in rows if kind == "message.delta")


def test_a_locked_run_stops_no_other_run_of_its_worker(one_worker: Load) -> None:
    load = one_worker
    locked = load.start(LONG)
    load.stack.wait_for(lambda: deltas(load, locked) > 1, what="text of the run")
    with outside(load, "SELECT 1 FROM runs_run WHERE id = %s FOR UPDATE", locked):
        before = deltas(load, locked)
        others = load.start_all(*[STREAM] * 10)
        load.stack.wait_for(lambda: all(status(load, run_id) == "completed" for run_id in others), 30, "their ends")
        # The end of a run writes its last text only.
        assert all(deltas(load, run_id) > 2 for run_id in others)
        assert (status(load, locked), deltas(load, locked)) == ("running", before)
    load.check()
    run = load.driver.get(locked)
    assert load.sql("SELECT lease_token FROM runs_run WHERE id = %s", locked) == [(1,)]
    assert streamed(load, locked) == load.driver.content(run)
    assert len(load.driver.content(run).split()) > 100


def test_a_reference_to_a_run_in_an_open_transaction_delays_no_step(one_worker: Load) -> None:
    """The insert of a row with a foreign key locks the referred row FOR KEY SHARE."""
    load = one_worker
    first = load.start(STREAM)
    chat = load.driver.get(first)["chatId"]
    second = load.driver.start("Hello", chat, onActiveRun="enqueue")["id"]
    load.nobody_answers()
    waiting = load.driver.ask(ASK)
    keys = [first, second, waiting["id"]]
    with outside(load, "SELECT 1 FROM runs_run WHERE id = ANY(%s) FOR KEY SHARE", keys):
        assert load.driver.cancel(waiting["id"])["status"] == "cancelled"
        for run_id in (first, second):
            assert load.driver.wait(run_id, timeout=20)["status"] == "completed"
    require_correct_data(load.stack)


def test_a_run_that_cannot_be_released_keeps_no_other_run(make_load: Callable[..., Load]) -> None:
    load = make_load(run_workers=2, environment=QUICK | {"config.queue.jobs.HOUSEKEEPING_RETRY_SECONDS": "10"})
    runs = load.start_all(*[LONG] * 6)
    owners = dict(load.sql("SELECT r.id, w.pid FROM runs_run r JOIN runs_worker w ON w.id = r.worker_id"))
    load.stack.wait_for(lambda: all(deltas(load, run_id) for run_id in runs), what="text of all runs")
    owners = dict(load.sql("SELECT r.id, w.pid FROM runs_run r JOIN runs_worker w ON w.id = r.worker_id"))
    (name, process), *_ = [(n, p) for n, p in load.stack.processes.items() if p.pid in owners.values()]
    lost = sorted(run_id for run_id, pid in owners.items() if pid == process.pid)
    bad, *others = lost
    # The number of losses does not fit the column after the next one.
    load.sql("UPDATE runs_run SET lease_losses = 32767 WHERE id = %s RETURNING 1", bad)
    load.stack.kill(name)
    others += [run_id for run_id in runs if run_id not in lost]
    load.stack.wait_for(lambda: all(status(load, run_id) == "completed" for run_id in others), 40, "the other runs")
    assert status(load, bad) == "running"
    (other,) = {"runs-1", "runs-2"} - {name}
    assert 1 <= load.stack.logs(other, 10_000).count(bad) <= 5
    load.sql("UPDATE runs_run SET lease_losses = 0 WHERE id = %s RETURNING 1", bad)
    load.check()


def test_without_beat_waitpoints_expire_and_throttled_runs_start(make_load: Callable[..., Load]) -> None:
    environment = QUICK | {
        "WAITPOINT_EXPIRY_SECONDS": "1",
        "RUN_USER_LIMIT": "1",
        "config.queue.jobs.HOUSEKEEPING_RETRY_SECONDS": "2",
    }
    load = make_load(run_workers=2, without=("beat", "maintenance"), environment=environment)
    load.nobody_answers()
    driver = load.driver
    bad = driver.ask(f"/say first\n{ASK}")["id"]
    # Its end needs the text of its stream, which cannot be read.
    event = load.sql("SELECT id, data FROM runs_runevent WHERE run_id = %s AND type = 'message.delta'", bad)[0]
    load.sql("UPDATE runs_runevent SET data = '{' WHERE id = %s RETURNING 1", event[0])
    load.sql("UPDATE runs_run SET unrecorded_text = true WHERE id = %s RETURNING 1", bad)
    locked = driver.ask(ASK)["id"]
    with outside(load, "SELECT 1 FROM runs_run WHERE id = %s FOR UPDATE", locked):
        expired = driver.wait(driver.ask(ASK)["id"], timeout=20)
        assert (expired["status"], expired["errorCode"]) == ("failed", "WAITPOINT_EXPIRED")
        assert (status(load, bad), status(load, locked)) == ("waiting", "waiting")
    assert driver.wait(locked, timeout=20)["errorCode"] == "WAITPOINT_EXPIRED"

    running = driver.start("/wait 600")["id"]
    driver.wait(running, "running")
    throttled = [driver.start("Hello")["id"] for _ in range(2)]
    marked = "SELECT count(*) FROM runs_run WHERE throttled"
    load.stack.wait_for(lambda: load.sql(marked) == [(2,)], what="throttled runs")
    load.stack.restart("runs-1", "runs-2", environment={"RUN_USER_LIMIT": "0"})
    assert [driver.wait(run_id, timeout=20)["status"] for run_id in throttled] == ["completed", "completed"]

    load.sql("UPDATE runs_runevent SET data = %s WHERE id = %s RETURNING 1", event[1], event[0])
    assert driver.wait(bad, timeout=20)["errorCode"] == "WAITPOINT_EXPIRED"
    driver.cancel(running)
    driver.wait(running)
    require_correct_data(load.stack)
