"""Workers are killed at each step of a retry and of a fallback: attempts are remembered, nothing is charged twice."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.faults.load import NOT_NEEDED, QUICK, Kind, Load, at_work
from tests.faults.providers import counting, rows
from tests.faults.test_crash_points import die_at
from tests.stack.process import free_port

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.services, pytest.mark.timeout(240)]

ATTEMPTS = 2
MANY = 60
ENVIRONMENT = QUICK | {"MODEL_ATTEMPTS": str(ATTEMPTS), "runs.llm.refusals.MODEL_RETRY_SECONDS": "0.2"}
# The model ``away`` is never there, so each run asks it twice and then its fallback.
MODELS = """
from runs.models import AgentModel, Provider
provider = Provider.objects.create(name="away", kind="openai", base_url="http://127.0.0.1:{port}/v1")
AgentModel.objects.create(
    name="away", display_name="Away", provider=provider, provider_model="m", price_in=500_000, price_out=1_500_000,
    fallbacks=["demo"],
)
"""
CALL = '/call calculate {"expression": "6*7"}'
RETRY = Kind(f"/say a\n/flaky 503 1 b\n{CALL}\n/flaky 429 1 {{result}} is it", "42 is it")
FALLBACK = Kind(f"/say a\n{CALL}\n/say {{result}} is it", "42 is it")
EXHAUSTED = Kind("/say so far\n/flaky 503 9", status="failed")
# Each test kills several workers, fewer than a run may lose. Each dies while it takes over the runs of the one before.
POINTS = (
    ("before_model", "after_failed_attempt", "after_failed_attempt"),
    ("after_model", "before_failed_attempt"),
    ("before_failed_attempt", "committed_failed"),
)


@pytest.fixture(scope="module")
def load() -> Iterator[Load]:
    with at_work(environment=ENVIRONMENT, prepare=MODELS.format(port=free_port()), without=NOT_NEEDED) as load:
        yield load


@pytest.mark.parametrize("points", POINTS)
def test_attempts_survive_the_death_of_workers(load: Load, points: tuple[str, ...]) -> None:
    stack = load.stack
    stack.kill("runs-2")
    die_at(load, "runs-1", points[0])
    runs = {load.start(RETRY): ["demo", "demo"], load.start(EXHAUSTED): ["demo"] * ATTEMPTS}
    runs[load.start(FALLBACK, model="away")] = ["away"] * ATTEMPTS
    stack.wait_for(lambda: not stack.processes["runs-1"].running, 60, f"a worker's death at {points[0]}")
    for point in points[1:]:
        die_at(load, "runs-2", point)
        stack.wait_for(lambda: not stack.processes["runs-2"].running, 60, f"a worker's death at {point}")
    del stack.processes["runs-1"].environment["CRASH_POINT"]
    stack.processes["runs-1"].start()
    load.check()
    for run_id, models in runs.items():
        check_attempts(load, run_id, models)


def check_attempts(load: Load, run_id: str, models: list[str]) -> None:
    """As many attempts as without deaths, an event for each that another request followed, a charge for each turn."""
    query = "SELECT model, next_model FROM runs_modelattempt WHERE run_id = %s ORDER BY turn_index, number"
    attempts = load.sql(query, run_id)
    assert [model for model, _ in attempts] == models
    followed = [after for _, after in attempts if after]
    told = load.sql(
        "SELECT data::json ->> 'model' FROM runs_runevent WHERE run_id = %s AND type = 'model.retrying' ORDER BY index",
        run_id,
    )
    assert [model for (model,) in told] == followed
    run = load.driver.get(run_id)
    assert run["usage"]["modelRetries"] == len(followed)
    query = "SELECT price::json ->> 'partial' FROM credits_ledgerentry WHERE run_id = %s AND type = 'USAGE'"
    charged = [partial for (partial,) in load.sql(query, run_id)]
    # Those that ended early are charged in part, and count too.
    assert len(charged) == run["usage"]["turns"]
    ((recorded,),) = load.sql("SELECT count(*) FROM runs_turn WHERE run_id = %s", run_id)
    assert charged.count(None) == recorded
    calls = [call["status"] for call in run["toolInvocations"]]
    assert calls == (["COMPLETED"] if run["status"] == "completed" else [])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_runs_complete_although_every_fifth_request_fails() -> None:
    with counting(0.05, failing=0.2) as provider:
        environment = QUICK | {
            "RUN_USER_LIMIT": "0",
            "MODEL_ATTEMPTS": "10",
            "runs.llm.refusals.MODEL_RETRY_SECONDS": "0.2",
        }
        environment |= {"RUN_LEASE_SECONDS": "10"}
        with at_work(environment=environment, prepare=rows(provider, default=True), without=NOT_NEEDED) as load:
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(load.start, [Kind("Hello", "counted")] * MANY))
            load.check(timeout=300)
            assert provider.failures > MANY // 10
            assert len(provider.begun) == MANY + provider.failures
