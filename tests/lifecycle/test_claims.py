from __future__ import annotations

import pytest

from runs import lifecycle, services
from runs.models import Run
from tests import factories
from tests.threads import side_by_side

LIMIT, STARTED = 3, 12


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
