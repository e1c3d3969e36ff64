"""What the runs of an agent or a model usually cost, for people who choose one. A job measures it each hour."""

from datetime import timedelta
from typing import Any

from django.db import transaction

from config.kernel import clock
from config.kernel.ids import first_id
from credits.sums import run_spent_subquery
from runs.models import Agent, AgentModel, Run, RunStatus, TypicalCredits

DAYS = 30
RUNS_MAX, RUNS_MIN = 10_000, 20
# What is measured, and the column of a run with its name.
MEASURED: dict[str, tuple[Any, str]] = {"agent": (Agent, "agent_name"), "model": (AgentModel, "resolved_model")}


def measure() -> int:
    """Measure all agents and models. Returns how many have enough runs."""
    # Ids are in the order of creation, so the index skips older runs.
    latest = Run.objects.filter(status=RunStatus.COMPLETED, pk__gte=first_id("run", clock.now() - timedelta(days=DAYS)))
    rows = []
    for kind, (model, column) in MEASURED.items():
        for name in model.objects.values_list("name", flat=True):
            runs = latest.filter(**{column: name}).order_by("-pk")
            costs = sorted(runs.values_list(run_spent_subquery(), flat=True)[:RUNS_MAX])
            if len(costs) >= RUNS_MIN:
                p50, p90 = (costs[-(-len(costs) * percent // 100) - 1] for percent in (50, 90))
                rows.append(TypicalCredits(kind=kind, name=name, p50=p50, p90=p90, runs=len(costs)))
    with transaction.atomic():
        TypicalCredits.objects.all().delete()
        TypicalCredits.objects.bulk_create(rows, ignore_conflicts=True)  # another process may measure, too
    return len(rows)
