"""What a run's turns cost: a hold before each request to a model, and the charge when the request has ended.

No status changes here. The transition that ends the request settles its hold in the same transaction.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from django.db import connection

from config.database.writes import Writes
from credits import ledger
from credits.models import LedgerEntry
from runs.lifecycle.moves import LeaseLost, as_known
from runs.lifecycle.text import unrecorded_text
from runs.models import Compaction, Run, RunStatus, Turn

logger = logging.getLogger(__name__)

_RUN = "SELECT 1 FROM runs_run WHERE id = %s AND lease_token = %s AND worker_id = %s AND status = %s"
_OWNED = {
    "postgresql": f"EXISTS (SELECT 1 FROM ({_RUN} FOR NO KEY UPDATE) owned)",  # noqa: S608  (constants)
    "sqlite": f"EXISTS ({_RUN})",
}


@dataclass(frozen=True, slots=True)
class Charge:
    """What a request to a model cost, at most its hold. ``price`` has the counts and prices, for the ledger."""

    hold: LedgerEntry
    amount: int
    price: dict[str, Any]

    @property
    def charged(self) -> int:
        return min(self.amount, self.hold.amount)


def hold_turn(run: Run, turn: int | str, request: int, amount: int, price: dict[str, Any]) -> LedgerEntry | None:
    """Hold ``amount`` for a request of the run's owner, the ``request``-th under its lease. None for 0: the model is
    free. ``turn`` is the turn's index, or ``compaction_key``.

    Raises LeaseLost, or InsufficientCredits without any change. A repeated call returns the hold of the first.
    """
    # Locks the run: when its next owner or its end looks for open holds, this one is there.
    owned = ledger.Condition(_OWNED[connection.vendor], [run.pk, run.lease_token, run.worker_id, RunStatus.RUNNING])
    try:
        return ledger.hold_turn(
            run.user_id,
            amount,
            cause=_cause(run, turn, request),
            run_id=run.id,
            chat_id=run.chat_id,
            price=price | {"turn": turn},
            only_if=owned,
        )
    except ledger.InsufficientCredits:
        found = Run.objects.filter(pk=run.pk, lease_token=run.lease_token, worker_id=run.worker_id)
        if not found.filter(status=RunStatus.RUNNING).exists():
            raise LeaseLost(run.pk) from None
        raise


def held_turn(run: Run, turn: int | str, request: int) -> LedgerEntry | None:
    """The hold of a request, if it was made."""
    return LedgerEntry.objects.filter(cause=_cause(run, turn, request)).first()


def _cause(run: Run, turn: int | str, request: int) -> str:
    return f"turn:{run.id}:{turn}:{run.lease_token}.{request}"


def usage(run: Run, turn: Turn) -> dict[str, Any]:
    """What a recorded turn changes in its run's row."""
    return {
        "unrecorded_text": False,
        "resolved_model": turn.model,
        "input_tokens": run.input_tokens + turn.input_tokens,
        "cached_input_tokens": run.cached_input_tokens + turn.cached_tokens,
        "output_tokens": run.output_tokens + turn.output_tokens,
        "turn_count": run.turn_count + 1,
    }


def charge(turn: Turn | Compaction, charged: Charge | None) -> None:
    """Charge a complete turn, or a summary. The run is locked."""
    if charged is not None:
        key = turn.index if isinstance(turn, Turn) else compaction_key(turn.index)
        ledger.charge_turn(charged.hold, charged.amount, turn_index=key, price=charged.price)


def charge_with(run: Run, turn: Turn, charged: Charge | None, guards: Writes, also: Writes) -> None:
    """``charge`` as a part of the transition of the run's owner, whose ``guards`` and other writes these are."""
    if charged is not None:
        # The account changes only if the run's row will: later guards must find theirs.
        guards.lock(Run, as_known(run, owned=True))
        ledger.charge_turn_with(guards, also, charged.hold, charged.amount, turn_index=turn.index, price=charged.price)


def compaction_key(index: int) -> str:
    """What stands for the turn's index in the ledger's rows of a compaction."""
    return f"c{index}"


def charge_partial(charged: Charge | None) -> None:
    """Charge a turn that ended early. The run is locked."""
    if charged is not None:
        turn_index = (charged.hold.price or {})["turn"]
        ledger.charge_partial_turn(charged.hold, charged.amount, turn_index=turn_index, price=charged.price)


def charge_dropped(run: Run, partial: Charge | None) -> None:
    """Charge the request that its owner drops, if its hold is open, and release any other. The run is locked."""
    for hold in ledger.open_turn_holds(run.id):
        charge_partial(partial if partial and partial.hold.pk == hold.pk else Charge(hold, 0, {}))


def charge_lost(run: Run) -> None:
    """Charge the turn whose worker was lost, or gave the run up, by the text that was streamed of it, and release its
    hold. The run is locked.
    """
    holds = ledger.open_turn_holds(run.id)
    streamed = unrecorded_text(run) if holds else ""
    for hold in holds:
        price: dict[str, Any] = hold.price or {}
        output_tokens = -(-len(streamed) // price["charsPerToken"])
        amount = 0
        if streamed:
            amount = -(-price["estimatedTokens"] * price["in"] // 1000) - (-output_tokens * price["out"] // 1000)
        counts = {"inputTokens": price["estimatedTokens"], "outputTokens": output_tokens, "estimated": True}
        shown = {name: price[name] for name in ("model", "in", "out")}
        charge_partial(Charge(hold, amount, shown | counts))
