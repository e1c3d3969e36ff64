"""What the runs of an agent or a model usually cost, as callers see it."""

from datetime import timedelta
from typing import Any

import pytest

from config.kernel import clock
from config.kernel.money import MICRO
from credits import ledger
from runs import catalogue
from runs.catalogue import agents, typical
from tests import factories

pytestmark = pytest.mark.django_db


def completed(user: Any, cost: int, **columns: Any) -> None:
    values = {"status": "completed", "agent": "support@1", "agent_name": "support", "resolved_model": "demo"}
    run = factories.RunFactory(chat__user=user, user=user, **values | columns)
    if cost:
        factories.charge_turn(user, cost * MICRO, run=run.pk, chat=run.chat_id, index=1)


def shown(client: Any, what: str, name: str) -> Any:
    catalogue.refresh()
    (item,) = [item for item in client.get(f"/api/v1/{what}").json()["items"] if item["name"] == name]
    return item["typicalCredits"]


@pytest.fixture(autouse=True)
def _catalogue(user: Any) -> None:
    ledger.grant(user.pk, 1000 * MICRO, cause="test")
    agents.save("support", display_name="Support")


def test_agents_and_models_say_what_their_runs_cost(session, user):
    for cost in range(1, 20):
        completed(user, cost)
    completed(user, 30, status="failed")
    completed(user, 30, agent="other@1", agent_name="other", resolved_model="other")
    assert typical.measure() == 0
    assert shown(session, "agents", "support") is None
    completed(user, 0)
    assert typical.measure() == 2
    assert shown(session, "agents", "support") == {"p50": 9, "p90": 17, "runs": 20}
    assert shown(session, "models", "demo") == {"p50": 9, "p90": 17, "runs": 20}


def test_old_runs_do_not_count(session, user, monkeypatch):
    for _ in range(20):
        completed(user, 1)
    assert typical.measure() == 2
    later = clock.now() + timedelta(days=31)
    monkeypatch.setattr(clock, "now", lambda: later)
    assert typical.measure() == 0
    assert shown(session, "agents", "support") is None
