"""What a run's steps cost: the holds of the steps, the settlement of a turn's hold in the transition that ends its
request, and whether a step waits for credits that other steps hold. No status changes here.
"""

from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.db import connection
from django.db.models import Exists, F, Q

from config.database.writes import Writes
from config.kernel import clock, money
from credits import ledger, sums
from credits.models import Account, LedgerEntry
from runs.errors import RunError
from runs.lifecycle.line import older_than
from runs.lifecycle.moves import LeaseLost, as_known
from runs.lifecycle.text import recorded_text, streamed_text
from runs.models import Compaction, InvocationStatus, Run, RunStatus, ToolInvocation, Turn
from runs.tokens import text_size
from runs.tools.base import MCP, ToolFailure
from runs.tools.questions import ASKS
from webhooks import outbox
from webhooks.events import CreditsEvent

# A step that waits for credits renews its mark (``credits_wanted_at``) more often than this. The mark of a worker that
# was killed or suspended lapses, and does not hold up younger runs.
WANTED_SECONDS = 5

# Locks the run, if no older run of its user waits for credits.
_FIRST = """SELECT 1 FROM runs_run WHERE id = %s AND NOT EXISTS (
    SELECT 1 FROM runs_run WHERE user_id = %s AND credits_wanted_at > %s AND status = %s AND (created_at, id) < (%s, %s)
)"""
_OWNED = " AND lease_token = %s AND worker_id = %s AND status = %s AND cancel_requested_at IS NULL"


@dataclass(frozen=True, slots=True)
class Charge:
    """What a request to a model cost, in micro-credits, at most its hold. A request to a free model has no hold.
    ``price`` has the counts and prices for the ledger. ``turns``: how many turns it adds to the run; 0 for a summary.
    """

    hold: LedgerEntry | None
    amount: int
    price: dict[str, Any]
    turns: int = 1

    @property
    def charged(self) -> int:
        return min(self.amount, self.hold.amount) if self.hold else 0

    @property
    def counts(self) -> dict[str, int]:
        """The tokens that the request adds to the run's usage, by column."""
        price = self.price
        tokens = price["inputTokens"], price.get("cachedInputTokens", 0), price["outputTokens"]
        return dict(zip(("input_tokens", "cached_input_tokens", "output_tokens"), tokens, strict=True))


@dataclass(frozen=True, slots=True)
class Refusal:
    """Credits or budget (``code``) are not enough for a step: its least and what is left, in micro-credits."""

    code: str
    needs: int
    left: int

    @property
    def message(self) -> str:
        needs, left = money.to_text(self.needs), money.to_text(max(0, self.left))
        what = "are left of maxCredits" if self.code == RunError.BUDGET_EXCEEDED else "are available"
        return f"The next step can cost up to {needs} credits; {left} {what}."


def refusal(run: Run, needs: int, *, of_credits: bool = True) -> Refusal | None:
    """Why budget or credits are not enough for a step that ``needs`` this amount, in micro-credits. None if they are
    enough, or if the step only has to wait for other steps. Reads only.
    """
    if run.max_credits is not None and (left := run.max_credits - sums.committed(run.id)) < needs:
        return Refusal(RunError.BUDGET_EXCEEDED, needs, left)
    available = spendable(run, needs) if of_credits else None
    return None if available is None or available >= needs else Refusal(RunError.INSUFFICIENT_CREDITS, needs, available)


def hold_call(run: Run, call: ToolInvocation) -> bool:
    """Hold the estimate. False if call or run must wait. Raises ToolFailure if credits or budget are not enough."""
    over = refusal(run, call.credit_estimate, of_credits=False)
    if over is None:
        try:
            price = {"perCall": call.credit_estimate}
            _hold(run, call.credit_estimate, owned=False, price=price, invocation_id=call.id, tool_key=call.name)
            return True
        except ledger.InsufficientCredits:
            over = refusal(run, call.credit_estimate)
    if over is None or run.waits_for_credits:
        return False
    raise ToolFailure(over.code, over.message)


def report_exhausted(run: Run) -> None:
    """Report to the app that the user's credits are not enough for the run's next step."""
    about = {"available": money.to_number(ledger.account_for(run.user_id).available), "runId": run.id}
    outbox.report_credits(run.user_id, CreditsEvent.EXHAUSTED, about)


def hold_turn(run: Run, turn: int | str, request: int, amount: int, price: dict[str, Any]) -> LedgerEntry | None:
    """Hold ``amount`` for the owner's request number ``request`` under its lease; None for 0. ``turn`` is the turn's
    index, or ``Compaction.KEY``. A repeated call returns the hold of the first call. Raises InsufficientCredits or
    LeaseLost, the latter also if a cancel was requested. In both cases nothing has changed.
    """
    # The statement locks the run, so its next owner, or its end, finds this hold when it looks for open holds.
    try:
        return _hold(run, amount, owned=True, price=price | {"turn": turn}, cause=_cause(run, turn, request))
    except ledger.InsufficientCredits:
        found = Run.objects.filter(pk=run.pk, lease_token=run.lease_token, worker_id=run.worker_id)
        if not found.filter(status=RunStatus.RUNNING, cancel_requested_at=None).exists():
            raise LeaseLost(run.pk) from None
        raise


def _hold(run: Run, amount: int, *, owned: bool, **about: Any) -> LedgerEntry | None:
    """``ledger.hold``, if no older run of the user waits for credits and, with ``owned``, the run is its worker's."""
    moments = [clock.now() - timedelta(seconds=WANTED_SECONDS), run.created_at]
    since, created_at = map(connection.ops.adapt_datetimefield_value, moments)
    sql, values = _FIRST, [run.pk, run.user_id, since, RunStatus.RUNNING, created_at, run.pk]
    if owned:
        sql, values = sql + _OWNED, [*values, run.lease_token, run.worker_id, RunStatus.RUNNING]
    guards = Writes()
    guards.execute(sql, values)
    return ledger.hold(run.user_id, amount, run_id=run.id, chat_id=run.chat_id, guards=guards, **about)


def held_turn(run: Run, turn: int | str, request: int) -> LedgerEntry | None:
    return LedgerEntry.objects.filter(cause=_cause(run, turn, request)).first()


def _cause(run: Run, turn: int | str, request: int) -> str:
    return f"turn:{run.id}:{turn}:{run.lease_token}.{request}"


def spendable(run: Run, least: int) -> int | None:
    """The available credits, for a step of the run that needs at least ``least``, in micro-credits. None if the step
    must wait: what is missing is only held for a while by other steps of the user, or an older run of the user waits.

    A step waits only for holds that are settled without a person: those of runs that execute, or that a worker resumes
    next. Other holds can last long. A run that waits for an answer can keep the hold of an approved call for a day. A
    call that awaits its outcome can keep its own for weeks. A call whose server asks the user keeps it until the run
    has asked, which comes after this step.
    """
    at_work = Q(status=RunStatus.RUNNING) | Q(status=RunStatus.QUEUED, started_at__isnull=False, throttled=False)
    others = Run.objects.filter(at_work, user_id=run.user_id)
    since = clock.now() - timedelta(seconds=WANTED_SECONDS)
    older = older_than(run.created_at, run.pk)
    waiting = Run.objects.filter(older, user_id=run.user_id, status=RunStatus.RUNNING, credits_wanted_at__gt=since)
    calls = ToolInvocation.objects.filter(run__in=others.values("pk"), status=InvocationStatus.DISPATCHING)
    stay = calls.filter(Q(awaiting__isnull=False) | Q(node_type=MCP, remote_task__contains=ASKS)).values("pk")
    # One statement, because all values must belong to the same moment.
    held_at_work = sums.held_by(others.values("pk"), without_calls=stay)
    account = Account.objects.filter(pk=run.user_id)
    free, held, is_behind = account.values_list(F("balance") - F("held"), held_at_work, Exists(waiting)).get()
    return free if free + held < least or (free >= least and not is_behind) else None


def wait_for_credits(run: Run, least: int) -> bool:
    """Whether the owner's step must wait (``spendable``); for WANTED_SECONDS, the run's row says so to younger runs."""
    waits = spendable(run, least) is None
    owned = Run.objects.filter(pk=run.pk, lease_token=run.lease_token, worker_id=run.worker_id)
    owned = owned if waits else owned.filter(credits_wanted_at__isnull=False)
    owned.update(credits_wanted_at=clock.now() if waits else None)
    return waits


def usage(run: Run, recorded: Turn | Compaction) -> dict[str, Any]:
    """The changes of the run's row by a recorded turn or summary."""
    changes: dict[str, Any] = {
        "input_tokens": run.input_tokens + recorded.input_tokens,
        "cached_input_tokens": run.cached_input_tokens + recorded.cached_tokens,
        "output_tokens": run.output_tokens + recorded.output_tokens,
    }
    if isinstance(recorded, Turn):
        changes |= {"turn_count": run.turn_count + 1, "unrecorded_text": False, "resolved_model": recorded.model}
    return changes


def charge(charged: Charge | None) -> None:
    """Charge a complete turn, or a summary. The run is locked."""
    if charged is not None and charged.hold is not None:
        ledger.settle(charged.hold, charged.amount, price=charged.price)


def charge_with(run: Run, charged: Charge | None, guards: Writes, also: Writes) -> None:
    """``charge`` within a transition of the run's owner: adds to its ``guards`` and its other writes."""
    if charged is not None and charged.hold is not None:
        # The account must change only if the run's row does, so the run's row is checked before the account.
        guards.lock(Run, as_known(run))
        ledger.settle_with(guards, also, charged.hold, charged.amount, price=charged.price)


def settle(run: Run, partial: Charge | None = None, *, ends: bool = False) -> dict[str, Any]:
    """Settle all open holds of the locked run's requests to models, and those of its calls too if the run ``ends``.
    Returns the changes of the run's row: turns that ended early count in the run's usage. ``partial`` is what the open
    request cost, if its owner knows it. Otherwise its streamed text says the cost; without text it is 0.
    """
    early: Counter[str] = Counter()
    # The streamed text that no turn has recorded.
    streamed = streamed_text(run)[len(recorded_text(run)) :] if run.unrecorded_text and partial is None else ""
    if partial is not None and partial.hold is None:
        early.update(partial.counts, turn_count=partial.turns)
    for hold in sums.open_holds(run.id):
        if hold.tool_key is None:
            charged = _streamed(streamed, hold) if streamed else partial
            if charged is None or charged.hold is None or charged.hold.pk != hold.pk or not charged.amount:
                ledger.settle(hold, 0)
            else:
                ledger.settle(hold, charged.amount, price=charged.price | {"partial": True})
                early.update(charged.counts, turn_count=charged.turns)
        elif ends:
            ledger.settle(hold, 0)
    return {name: getattr(run, name) + count for name, count in early.items()}


def _streamed(streamed: str, hold: LedgerEntry) -> Charge:
    """The least that an open request cost, by its streamed text: its owner is lost, or has given the run up."""
    price: dict[str, Any] = hold.price or {}
    output_tokens = text_size(streamed).tokens
    amount = -(-price["estimatedTokens"] * price["in"] // 1000) - (-output_tokens * price["out"] // 1000)
    counts = {"inputTokens": price["estimatedTokens"], "outputTokens": output_tokens, "estimated": True}
    return Charge(hold, amount, {name: price[name] for name in ("model", "in", "out")} | counts)
