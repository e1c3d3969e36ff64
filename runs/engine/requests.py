"""A request to a model: how much it may cost, its hold and its stream, what it cost, and the record of its failure.
Also the exceptions that end a run in its worker.

The upper bound of the input tokens is never below what a provider counts: a token is at least one byte of the request.
If a provider has counted a request of the model with the same beginning, that count is used for the beginning.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NamedTuple

from django.conf import settings

from config.kernel import clock
from config.kernel.errors import Unavailable
from config.telemetry import tracing
from credits import ledger, sums
from credits.models import LedgerEntry
from runs import lifecycle
from runs.catalogue.definitions import ModelDefinition
from runs.engine.session import Session
from runs.errors import FailureReason, RunError
from runs.lifecycle import Refusal, RunFailed
from runs.llm import files as llm_files
from runs.llm.base import ModelError, ModelRequest, ToolCall, TurnEnd, Usage
from runs.llm.measure import Size, measure, upper_bound
from runs.llm.refusals import next_model
from runs.llm.registry import client_for
from runs.models import CountedBeginning, ModelAttempt, Run, ToolInvocation

# Micro-credits: each of a turn's four amounts is rounded.
ROUNDING = 4
TRIES = 10  # another run of the user can take the credits after they were looked up and before the hold
KEPT = 10_000  # the most beginnings that a process remembers
WORTH = 0.95  # a count is stored only if it is below this part of the known count

# The turn's index or the key of a compaction, and the number of the request under the run's lease.
Step = tuple[int | str, int]

_known: dict[str, int] = {}  # the lowest count of a request by the digest of its beginning


class Exhausted(RunFailed):
    """Credits or budget are not enough for the next step: the ``call``, or if that is None, a request to a model."""

    def __init__(self, refusal: Refusal, call: ToolInvocation | None = None) -> None:
        self.refusal, self.call = refusal, call
        super().__init__(refusal.code, refusal.message)


class Allowance(NamedTuple):
    """What ``allow`` grants to a request. ``hold`` is None for a free model. ``size`` is that of the request, for the
    bound of later requests. ``limited_by`` says what set the output limit: "model", "budget" or "credits".
    """

    hold: LedgerEntry | None
    output_tokens: int
    size: Size
    limited_by: str = "model"


class Unclear(Exception):
    """The upper bound of the input tokens is too high for credits or budget, but the provider's own count can be lower.
    The argument is the digest of the request.
    """


class Short(Exception):
    """Credits or budget are not enough for the request, which ``needs`` at least this amount in micro-credits.
    ``refusal`` says which is not enough. It is None if the request only has to wait: other steps hold the credits.
    """

    def __init__(self, needs: int, refusal: Refusal | None) -> None:
        self.needs, self.refusal = needs, refusal
        super().__init__(needs, refusal)


async def with_files(session: Session, request: ModelRequest, held: contextlib.AsyncExitStack) -> ModelRequest:
    """The request with the content of its files, whose memory ``held`` frees. Raises ModelError and RunFailed."""
    if not client_for(request.model.server).reads_files:
        return request
    process = session.process
    files = llm_files.with_files(request, session.run.user_id, process.file_threads, process.attachment_bytes)
    try:
        return await held.enter_async_context(files)
    except Unavailable:
        raise RunFailed(RunError.INTERNAL_ERROR, "The message's attachments could not be read.") from None


class Answer(NamedTuple):
    allowance: Allowance
    calls: list[ToolCall]
    end: TurnEnd


async def ask(
    session: Session, request: ModelRequest, key: int | str, listen: Callable[[str], object], *, reserve: int = 0
) -> Answer:
    """Hold the most that the request can cost (``allow``, which has ``reserve``), and make it. ``key`` is the turn's
    index or the key of a compaction; ``listen`` gets the text. Raises ModelError. Raises Short if credits or budget are
    not enough; for a turn, also if they cut its answer within a call.
    """
    session.requests += 1
    step, counted, may_count = (key, session.requests), session.counted(), request.model.dialect.counts_tokens
    try:
        allowance = await session.db(allow, request, step, counted, reserve, may_count)
    except Unclear as unclear:
        if tokens := await client_for(request.model.server).count(request):
            counted[unclear.args[0]] = tokens
        allowance = await session.db(allow, request, step, counted, reserve)
    full = request.max_output_tokens
    request = replace(request, max_output_tokens=allowance.output_tokens)
    session.partial_charge = partial(partial_charge, request, allowance)
    lifecycle.crash_point("before_summary" if request.summarises else "before_model")
    await session.confirm_lease()
    calls: list[ToolCall] = []
    model = request.model
    with tracing.span("model", model=model.name, provider=model.server.name):
        try:
            async for event in client_for(model.server).stream(request):
                if isinstance(event, str):
                    listen(event)
                elif isinstance(event, ToolCall):
                    calls.append(event)
                else:
                    return Answer(allowance, calls, event)
        except ModelError as error:
            is_cut = error.reason is FailureReason.OUTPUT_LIMIT and allowance.limited_by != "model"
            if allowance.hold is None or not is_cut or request.summarises:
                raise
            needs = _most(model, (allowance.hold.price or {})["inputTokens"], full)
            await session.end_request()
            raise Short(needs, await session.db(lifecycle.refusal, needs)) from None
    raise ModelError(FailureReason.MALFORMED_ANSWER, detail="The adapter sent no end.")


def to_ask(models: Sequence[ModelDefinition], failed: Sequence[ModelAttempt]) -> list[ModelDefinition]:
    """The models that may be asked, in order: the one that the last failed request chose, then those not asked yet."""
    if failed and not failed[-1].next_model:
        return []
    asked = {attempt.model for attempt in failed}
    chosen = [model for model in models if failed and model.name == failed[-1].next_model]
    return chosen + [model for model in models if model.name not in asked]


def failed_request(
    session: Session,
    model: ModelDefinition,
    error: ModelError,
    started_at: datetime,
    chain: Sequence[ModelDefinition],
    *,
    again: bool,
    compaction: int = 0,
) -> ModelAttempt:
    """The row of a failed request and what follows it. ``again``: the same model at once, whatever the reason."""
    asked = [earlier.model for earlier in session.journal.failed(compaction)] + [model.name]
    names = [other.name for other in chain]
    following, delay = (model.name, 0.0) if again else next_model(error, asked, names, session.remaining_seconds())
    now = clock.now()
    return ModelAttempt(
        run=session.run,
        turn_index=len(session.journal.turns) + 1,
        compaction=compaction,
        number=len(asked),
        model=model.name,
        provider=model.server.name,
        reason=error.reason,
        http_status=error.status,
        detail=error.detail,
        next_model=following,
        next_at=now + timedelta(seconds=delay) if following else None,
        started_at=started_at,
        finished_at=now,
    )


def allow(
    run: Run, request: ModelRequest, step: Step, counted: Mapping[str, int], reserve: int = 0, may_count: bool = False
) -> Allowance:
    """Hold the most that the request can cost, with an output limit for which credits and budget are enough.
    ``counted``: as in ``measure.upper_bound``. ``reserve``: micro-credits that must be left for the request after this
    one. ``may_count``: the provider can count the request's tokens; then Unclear is raised before the limit is lowered.
    Raises Short if the limit would be below MODEL_MIN_OUTPUT_TOKENS; also LeaseLost.
    """
    model, size = request.model, measure(request)
    if not (model.price_in or model.price_out or model.price_cached_in or model.price_cache_write):
        return Allowance(None, request.max_output_tokens, size)
    tokens = upper_bound(request, {**_counted_before(size), **counted}, size)
    lowest = min(settings.MODEL_MIN_OUTPUT_TOKENS, request.max_output_tokens)
    least = _most(model, tokens, lowest) + reserve
    limit = _most(model, tokens, request.max_output_tokens)
    refusal = Refusal(RunError.INSUFFICIENT_CREDITS, least, 0)
    if run.max_credits is not None and (left := run.max_credits - sums.committed(run.id)) - reserve < limit:
        limit, refusal = left - reserve, Refusal(RunError.BUDGET_EXCEEDED, least, left)
    short = Short(least, None)
    for number in range(TRIES):
        if number or reserve:
            available = lifecycle.spendable(run, least)
            if available is None:
                break
            if available - reserve < limit:
                limit, refusal = available - reserve, Refusal(RunError.INSUFFICIENT_CREDITS, least, available)
        output_tokens = _affordable(model, tokens, limit, request.max_output_tokens)
        if may_count and output_tokens < request.max_output_tokens:
            raise Unclear(size.beginnings[-1][0])
        if output_tokens < lowest:
            short = Short(least, refusal)
            break
        limited_by = "credits" if refusal.code == RunError.INSUFFICIENT_CREDITS else "budget"
        limited_by = limited_by if output_tokens < request.max_output_tokens else "model"
        price: dict[str, Any] = {"model": model.name, "in": model.price_in, "out": model.price_out}
        price |= {"inputTokens": tokens, "outputTokens": output_tokens, "limitedBy": limited_by}
        price["estimatedTokens"] = min(size.tokens, model.context_tokens)
        with contextlib.suppress(ledger.InsufficientCredits):
            return _allowance(lifecycle.hold_turn(run, *step, _most(model, tokens, output_tokens), price), size)
    # The commit's answer may have been lost: credits that this step holds may not be enough for a second hold.
    if held := lifecycle.held_turn(run, *step):
        return _allowance(held, size)
    raise short


def _allowance(hold: Any, size: Size) -> Allowance:
    """The allowance of a hold. A repeated call gets the hold of the first call, and so the same limit."""
    return Allowance(hold, hold.price["outputTokens"], size, hold.price["limitedBy"])


def least_cost(request: ModelRequest) -> int:
    """The least that must be available for the request, in micro-credits."""
    output_tokens = min(settings.MODEL_MIN_OUTPUT_TOKENS, request.max_output_tokens)
    return _most(request.model, upper_bound(request), output_tokens)


def _most(model: ModelDefinition, input_tokens: int, output_tokens: int) -> int:
    """The most that these tokens can cost, in micro-credits."""
    price_in = max(model.price_in, model.price_cached_in, model.price_cache_write)
    return -(-input_tokens * price_in // 1000) - (-output_tokens * model.price_out // 1000) + ROUNDING


def _affordable(model: ModelDefinition, input_tokens: int, limit: int, most: int) -> int:
    """The output tokens, up to ``most``, for which ``limit`` micro-credits are enough; -1 if not for the input."""
    left = limit - _most(model, input_tokens, 0)
    if left < 0:
        return -1
    return min(most, left * 1000 // model.price_out) if model.price_out else most


def charge_of(model: ModelDefinition, usage: Usage, hold: LedgerEntry | None) -> lifecycle.Charge:
    price: dict[str, Any] = {"model": model.name, "in": model.price_in, "out": model.price_out}
    price |= {"inputTokens": usage.input_tokens, "outputTokens": usage.output_tokens}
    if usage.cached_tokens:
        price |= {"cachedInputTokens": usage.cached_tokens, "cachedIn": model.price_cached_in}
    if usage.cache_write_tokens:
        price |= {"cacheWriteTokens": usage.cache_write_tokens, "cacheWrite": model.price_cache_write}
    if usage.estimated:
        price["estimated"] = True
    amount = model.cost(usage.input_tokens, usage.cached_tokens, usage.cache_write_tokens, usage.output_tokens)
    return lifecycle.Charge(hold, amount, price)


def partial_charge(request: ModelRequest, allowance: Allowance) -> lifecycle.Charge | None:
    """What a request that ended early cost, by the provider's counts or an estimate; None if no answer had begun."""
    usage = request.progress.usage
    if usage is None:
        return None
    return replace(charge_of(request.model, usage(), allowance.hold), turns=int(not request.summarises))


def _counted_before(size: Size) -> dict[str, int]:
    """The lowest known count of the request's first beginning, by its digest; or nothing. At most one query."""
    if not size.beginnings:
        return {}
    digest = size.beginnings[0][0]
    tokens = _known.get(digest)
    if tokens is None:
        tokens = CountedBeginning.objects.filter(pk=digest).values_list("tokens", flat=True).first()
        if tokens is None:
            return {}
        _remember(digest, tokens)
    return {digest: tokens}


def is_news(allowance: Allowance, tokens: int) -> bool:
    """Whether to store the provider's count: it lowers later bounds, or shows that the known count is too low."""
    if not (beginnings := allowance.size.beginnings):
        return False
    return _is_over(allowance, tokens) or tokens < WORTH * _known.get(beginnings[0][0], float("inf"))


def learn_count(allowance: Allowance, tokens: int) -> None:
    digest = allowance.size.beginnings[0][0]
    CountedBeginning.objects.bulk_create([CountedBeginning(digest=digest, tokens=tokens)], ignore_conflicts=True)
    known = CountedBeginning.objects.filter(pk=digest)
    (known if _is_over(allowance, tokens) else known.filter(tokens__gt=tokens)).update(tokens=tokens)
    _remember(digest, tokens)


def _is_over(allowance: Allowance, tokens: int) -> bool:
    """Whether the provider counted more than the bound."""
    return allowance.hold is not None and tokens > (allowance.hold.price or {})["inputTokens"]


def _remember(digest: str, tokens: int) -> None:
    if len(_known) >= KEPT:
        _known.clear()
    _known[digest] = tokens
