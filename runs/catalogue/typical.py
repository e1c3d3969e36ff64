"""What the runs of an agent or a model usually cost, for people who choose one. A job measures it each hour."""

from datetime import timedelta

from config.kernel import clock
from config.kernel.ids import first_id
from credits.sums import run_spent_subquery
from runs.models import Agent, AgentModel, Run, RunStatus, TypicalCredits

DAYS = 30
RUNS_MAX, RUNS_MIN = 10_000, 20
COLUMNS = {"agent": "agent_name", "model": "resolved_model"}  # what is measured, and the column of a run with its name


def measure() -> int:
    """Measure all agents and models. Returns how many have enough runs."""
    names = [("agent", name) for name in Agent.objects.values_list("name", flat=True)]
    names += [("model", name) for name in AgentModel.objects.values_list("name", flat=True)]
    rows = [row for kind, name in names if (row := _measured(kind, name))]
    TypicalCredits.objects.bulk_create(
        rows, update_conflicts=True, unique_fields=["kind", "name"], update_fields=["p50", "p90", "runs"]
    )
    for kind in COLUMNS:
        measured = [row.name for row in rows if row.kind == kind]
        TypicalCredits.objects.filter(kind=kind).exclude(name__in=measured).delete()
    return len(rows)


def _measured(kind: str, name: str) -> TypicalCredits | None:
    since = clock.now() - timedelta(days=DAYS)
    # Ids are in the order of creation, so the index skips older runs.
    runs = Run.objects.filter(status=RunStatus.COMPLETED, pk__gte=first_id("run", since), **{COLUMNS[kind]: name})
    costs = sorted(runs.order_by("-pk").values_list(run_spent_subquery(), flat=True)[:RUNS_MAX])
    if len(costs) < RUNS_MIN:
        return None
    p50, p90 = (costs[-(-len(costs) * percent // 100) - 1] for percent in (50, 90))
    return TypicalCredits(kind=kind, name=name, p50=p50, p90=p90, runs=len(costs))
