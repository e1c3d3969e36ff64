"""Workers are killed at each step of a compaction: it is made and paid once, and the chat goes on."""

from collections.abc import Iterator

import pytest

from tests.faults.load import NOT_NEEDED, QUICK, Kind, Load, at_work
from tests.faults.test_crash_points import die_at

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.services, pytest.mark.timeout(240)]

# Models that answer as the demo model does. The window of ``narrow`` cannot hold the chat.
MODELS = """
from runs.models import AgentModel, Provider
AgentModel.objects.create(
    name="narrow", display_name="Narrow", provider=Provider.objects.get(name="demo"), provider_model="demo",
    price_in=500_000, price_out=1_500_000, context_tokens=3000, max_output_tokens=500,
)
"""
SAID = Kind("/say a", "a")
# Each test kills two workers. The second dies while it takes over the runs of the first.
POINTS = (
    ("after_summary", "before_summary"),
    ("committed_compaction", "before_model"),
    ("after_summary", "committed_compaction"),
)


@pytest.fixture(scope="module")
def load() -> Iterator[Load]:
    with at_work(environment=QUICK, prepare=MODELS, without=NOT_NEEDED) as load:
        yield load


@pytest.mark.parametrize("points", POINTS)
def test_a_compaction_is_made_and_paid_once(load: Load, points: tuple[str, str]) -> None:
    stack = load.stack
    first = stack.processes["runs-1"]
    if first.environment.pop("CRASH_POINT", None) or not first.running:
        stack.restart("runs-1")
    chat = load.driver.chat()

    def start(message: str, **body: str) -> str:
        run_id = str(load.driver.start(message, chat, **body)["id"])
        load.runs[run_id] = SAID if message.startswith("/") else Kind(message)
        return run_id

    for number in range(6):
        load.driver.wait(start(f"remember number {number} " + "word " * 400, model="demo"))
    stack.kill("runs-2")
    die_at(load, "runs-1", points[0])
    runs = [start("/say a", model="narrow"), start("/say a", model="narrow", onActiveRun="enqueue")]
    stack.wait_for(lambda: not stack.processes["runs-1"].running, 60, f"a worker's death at {points[0]}")
    die_at(load, "runs-2", points[1])
    stack.wait_for(lambda: not stack.processes["runs-2"].running, 60, f"a worker's death at {points[1]}")
    del stack.processes["runs-1"].environment["CRASH_POINT"]
    stack.processes["runs-1"].start()
    load.check()
    rows = load.sql("SELECT run_id, index, last_run_id, cost, text FROM runs_compaction WHERE chat_id = %s", chat)
    assert {row[0] for row in rows} == {runs[0]}
    assert sorted(row[1] for row in rows) == list(range(1, len(rows) + 1))
    assert len({row[2] for row in rows}) == len(rows)
    assert all("remember number 0" in row[4] for row in rows)
    charged = load.sql(
        """
        SELECT usage.amount FROM credits_ledgerentry usage JOIN credits_ledgerentry hold ON hold.id = usage.against_id
        WHERE usage.run_id = %s AND usage.type = 'USAGE' AND hold.price ->> 'turn' LIKE 'c%%'
        """,
        runs[0],
    )
    assert sorted(amount for (amount,) in charged) == sorted(row[3] for row in rows)
    shown = load.sql("SELECT count(*) FROM runs_runevent WHERE run_id = %s AND type = 'context.compacted'", runs[0])
    assert shown == [(len(rows),)]
