"""An answer, a cancel and the expiry of one waitpoint at the same instant, a hundred and fifty times."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from django.db import connections

from chats.services import make_chat
from config.kernel import clock
from credits import ledger
from runs import lifecycle, services
from runs.models import Run, ToolInvocation, Turn, Waitpoint, WaitpointKind

pytestmark = [
    pytest.mark.faults,
    pytest.mark.services,
    pytest.mark.timeout(300),
    pytest.mark.django_db(transaction=True),
]

ROUNDS = 150
PRICE = 12_000_000
TURN_COST = 1000
# The permitted final states of (run, waitpoint, call). In this order: the answer came first, and the cancel found the
# run queued; the cancel came first; the expiry came first.
OUTCOMES = {
    ("cancelled", "COMPLETED", "CANCELLED"),
    ("cancelled", "EXPIRED", "CANCELLED"),
    ("failed", "EXPIRED", "CANCELLED"),
}


def waiting_run(user: Any) -> Waitpoint:
    """A run that waits for approval, in the state that its worker leaves."""
    run = services.start_run(user, make_chat(user)[0].pk, message="x")
    claimed = lifecycle.claim(run.pk, "wrk_test")
    assert claimed
    now = clock.now()
    turn = Turn(run=claimed, index=1, model="demo", held=TURN_COST, cost=TURN_COST, started_at=now, finished_at=now)
    call = ToolInvocation(
        run=claimed,
        turn_index=1,
        call_index=1,
        tool_call_id="c",
        name="draw_chart",
        credit_estimate=PRICE,
        created_at=now,
        updated_at=now,
    )
    hold = lifecycle.hold_turn(claimed, 1, 1, TURN_COST, {})
    assert hold
    charge = lifecycle.Charge(hold, TURN_COST, {})
    moved = lifecycle.record_turn(claimed, turn, [call], content="", delta="", charge=charge)
    payload = {"toolName": "draw_chart", "estimatedMicro": PRICE, "thresholdMicro": 0}
    payload |= {"toolInvocationId": call.id, "input": call.input}
    lifecycle.open_waitpoint(moved.run, call, WaitpointKind.CREDIT_APPROVAL, payload)
    return Waitpoint.objects.get(run=claimed)


def test_the_first_of_answer_cancel_and_expiry_wins(user, settings) -> None:
    settings.RUN_USER_LIMIT = 0
    ledger.account_for(user.pk)
    ledger.grant(user.pk, ROUNDS * (PRICE + TURN_COST), cause="test", reason="a test")
    before = ledger.account_for(user.pk).balance
    seen: Counter[tuple[str, str, str]] = Counter()
    barrier = threading.Barrier(3)

    def at_once(act: Any, *args: Any) -> Any:
        barrier.wait(30)
        return act(*args)

    try:
        with ThreadPoolExecutor(3) as pool:
            for number in range(ROUNDS):
                waitpoint = waiting_run(user)
                # Some answers arrive before the expiry and some just after it.
                left = timedelta(seconds=60) if number % 2 else timedelta(milliseconds=number % 20)
                Waitpoint.objects.filter(pk=waitpoint.pk).update(expires_at=clock.now() + left)
                waitpoint.refresh_from_db()
                answer = {"kind": WaitpointKind.CREDIT_APPROVAL, "approved": True}
                acts = (
                    pool.submit(at_once, services.respond, waitpoint, answer),
                    pool.submit(at_once, services.cancel_run, waitpoint.run),
                    pool.submit(at_once, lifecycle.expire_waitpoint, waitpoint.pk),
                )
                for act in acts:
                    act.result(30)
                run = Run.objects.get(pk=waitpoint.run_id)
                waitpoint.refresh_from_db()
                call = ToolInvocation.objects.get(run=run)
                outcome = (run.status, waitpoint.status, call.status)
                seen[outcome] += 1
                assert ledger.account_for(user.pk).held == 0
            for closing in [pool.submit(at_once, connections.close_all) for _ in range(3)]:
                closing.result(30)
    finally:
        print(dict(seen))
    account = ledger.account_for(user.pk)
    assert (account.balance, account.held) == (before - ROUNDS * TURN_COST, 0)
    assert set(seen) == OUTCOMES, seen
    assert lifecycle.violations() == []
