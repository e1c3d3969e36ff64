from __future__ import annotations

import asyncio
import re
from datetime import timedelta

import pytest
from django.db import connection
from django.db.models import QuerySet

from config.kernel import clock
from runs import lifecycle, services
from runs.engine.session import Claimed, Process
from runs.lifecycle import line
from runs.models import Run
from tests import factories
from tests.threads import side_by_side

LIMIT, STARTED, BACKLOG = 3, 12, 300


def rows_read(query: QuerySet[Run]) -> float:
    """The rows that the steps of the query read, with those that they drop."""
    plan = query.explain(analyze=True, timing=False)
    steps = re.findall(r"actual rows=(\d+) loops=(\d+)|Rows Removed by (?:Index Recheck|Filter): (\d+)", plan)
    return sum(int(rows or dropped) * int(loops or 1) for rows, loops, dropped in steps)


@pytest.mark.django_db(transaction=True)
def test_concurrent_claims_respect_the_user_limit(settings, user):
    settings.RUN_USER_LIMIT = LIMIT
    started = [
        services.start_run(user, factories.ChatFactory(user=user).pk, message="Hello").pk for _ in range(STARTED)
    ]
    claimed = side_by_side(STARTED, lambda number: lifecycle.claim(started[number], "wkr_1"))
    assert sum(run is not None for run in claimed) == LIMIT
    assert Run.objects.filter(status="running").count() == LIMIT
    assert Run.objects.filter(status="queued", throttled=True).count() == STARTED - LIMIT


@pytest.mark.django_db(transaction=True)
def test_runs_that_end_at_the_same_moment_start_as_many(settings, user, nudges):
    settings.RUN_USER_LIMIT = LIMIT
    started = [
        services.start_run(user, factories.ChatFactory(user=user).pk, message="Hello").pk for _ in range(STARTED)
    ]
    running = [run for run_id in started if (run := lifecycle.claim(run_id, "wkr_1"))]
    nudges.clear()
    side_by_side(LIMIT, lambda number: lifecycle.cancel(running[number], content="", delta=""))
    nudged = [run_id for _, run_ids, _ in nudges for run_id in run_ids]
    assert sorted(nudged) == started[LIMIT : 2 * LIMIT]
    # No later run takes their places, and a sweep finds them if their messages are lost.
    assert lifecycle.claim(started[2 * LIMIT], "wkr_1") is None
    assert lifecycle.wakeable_runs(STARTED) == (started[LIMIT : 2 * LIMIT], 0)
    assert all(lifecycle.claim(run_id, "wkr_1") for run_id in nudged)
    assert Run.objects.filter(status="running").count() == LIMIT


@pytest.mark.django_db
def test_claim_of_the_oldest_run_reads_nothing_of_those_behind_it(user):
    if connection.vendor != "postgresql":
        pytest.skip("about PostgreSQL's plans")
    chats = factories.ChatFactory.create_batch(BACKLOG, user=user)
    begun = clock.now()
    rows = [
        Run(chat=chat, user=user, throttled=True, user_message_id="msg_1", created_at=begun + timedelta(seconds=number))
        for number, chat in enumerate(chats)
    ]
    Run.objects.bulk_create(rows)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE runs_run")
        # The table is small, and all of it is this user's.
        cursor.execute("SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off")
    oldest, newest = (rows_read(line._to_claim(run.pk)) for run in (rows[0], rows[-1]))
    assert oldest < 10
    assert newest > BACKLOG


@pytest.mark.django_db(transaction=True)
def test_runs_of_several_users_are_claimed_at_the_same_moment(settings, user):
    settings.RUN_WORKER_DB_THREADS = 1
    owners = [user, factories.UserFactory(), factories.UserFactory()]
    started = [
        services.start_run(owner, factories.ChatFactory(user=owner).pk, message="Hello").pk
        for owner in owners
        for _ in range(STARTED)
    ]

    async def claim_all() -> list[Claimed | None]:
        process = Process(worker_id="wkr_1")
        found = await asyncio.gather(*map(process.claim, [*started, "run_unknown"]))
        await process.db(lambda: connection.close())
        process.db_threads.shutdown()
        return found

    *claimed, unknown = asyncio.run(claim_all())
    assert [found.run.pk for found in claimed if found] == started
    assert unknown is None
