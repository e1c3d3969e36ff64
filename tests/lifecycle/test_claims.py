import asyncio
from datetime import timedelta

import pytest
from django.db import connection, transaction

from config.kernel import clock
from runs import lifecycle, services
from runs.engine.process import Process
from runs.engine.session import Claimed, claim
from runs.lifecycle import line
from runs.models import Run
from tests import factories
from tests.plans import plans_of
from tests.threads import side_by_side

LIMIT, STARTED, BACKLOG = 3, 12, 300


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
@pytest.mark.parametrize("leave", [lifecycle.finish, lifecycle.park_run])
def test_runs_that_leave_their_places_at_the_same_moment_start_as_many(settings, user, nudges, leave):
    settings.RUN_USER_LIMIT = LIMIT
    started = [
        services.start_run(user, factories.ChatFactory(user=user).pk, message="Hello").pk for _ in range(STARTED)
    ]
    running = [run for run_id in started if (run := lifecycle.claim(run_id, "wkr_1"))]
    nudges.clear()
    side_by_side(LIMIT, lambda number: leave(running[number]))
    nudged = [run_id for _, run_ids, _ in nudges for run_id in run_ids]
    assert sorted(nudged) == started[LIMIT : 2 * LIMIT]
    # No later run takes their places, and a sweep finds them if their messages are lost.
    assert lifecycle.claim(started[2 * LIMIT], "wkr_1") is None
    assert lifecycle.wakeable_runs(STARTED) == (started[LIMIT : 2 * LIMIT], 0)
    assert all(lifecycle.claim(run_id, "wkr_1") for run_id in nudged)
    assert Run.objects.filter(status="running", parked=False).count() == LIMIT


def backlog(user, count: int, **fields) -> list[Run]:
    """Throttled runs of the user, the oldest first."""
    chats = factories.ChatFactory.create_batch(count, user=user)
    begun = clock.now()
    common = {"user": user, "throttled": True, "due_at": None, "user_message_id": "msg_1"} | fields
    return Run.objects.bulk_create(
        Run(chat=chat, created_at=begun + timedelta(seconds=number), **common) for number, chat in enumerate(chats)
    )


@pytest.mark.django_db
def test_a_run_starts_if_the_runs_before_it_leave_room(settings, user):
    settings.RUN_USER_LIMIT = LIMIT
    rows = backlog(user, LIMIT + 1)
    factories.RunFactory(chat__user=user, status="running")
    throttled = []
    for row in rows:
        with transaction.atomic():
            throttled.append(line.lock_claimable(row.pk, "wrk_1") is None)
    assert throttled == [False] * (LIMIT - 1) + [True] * 2
    settings.RUN_USER_LIMIT = 1
    with transaction.atomic():
        assert line.lock_claimable(rows[0].pk, "wrk_1") is None


@pytest.mark.django_db
@pytest.mark.skipif("connection.vendor != 'postgresql'", reason="about PostgreSQL's plans")
@pytest.mark.parametrize("at", [0, BACKLOG // 2, -1])
def test_a_claim_reads_no_more_of_a_backlog_than_the_limit(settings, user, at):
    settings.RUN_USER_LIMIT = LIMIT
    rows = backlog(user, BACKLOG)
    with plans_of("runs_run") as plans:
        assert (line.lock_claimable(rows[at].pk, "wrk_1") is None) is (at != 0)
    assert plans.texts
    assert plans.rows < 20


@pytest.mark.django_db
@pytest.mark.skipif("connection.vendor != 'postgresql'", reason="about PostgreSQL's plans")
def test_a_search_for_throttled_runs_reads_one_of_each_user(settings):
    settings.RUN_USER_LIMIT = 1
    users = factories.UserFactory.create_batch(3)
    for owner in users:
        factories.RunFactory(chat__user=owner, status="running")
        backlog(owner, BACKLOG)
    with plans_of("runs_run") as plans:
        assert lifecycle.wakeable_runs(STARTED) == ([], 0)
    assert plans.texts
    assert plans.rows < 20 * len(users)


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
        process = Process()
        process.worker_id = "wkr_1"
        found = await asyncio.gather(*(claim(process, run_id) for run_id in [*started, "run_unknown"]))
        await process.db(lambda: connection.close())
        process.db_threads.shutdown()
        return found

    *claimed, unknown = asyncio.run(claim_all())
    assert [found.run.pk for found in claimed if found] == started
    assert unknown is None
