"""What a model turn costs that ended early, or whose provider counts wrongly: an account with a provider over HTTP."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from credits.models import Account, LedgerEntry
from runs import catalogue, lifecycle
from runs.models import AgentModel, Provider, Run, Turn
from tests.driver import until
from tests.lifecycle.conftest import Bench, vanish
from tests.llm.helpers import OPENAI_END, data, openai_delta
from tests.llm.model_server import ModelServer, serving
from tests.llm.wire_formats import INPUT_TOKENS, OUTPUT_TOKENS
from tests.tiers import slow

pytestmark = pytest.mark.django_db(transaction=True)

KINDS = ("openai", "openai_responses", "anthropic")
PRICE_IN, PRICE_OUT = 500_000, 1_500_000
# Of an answer of 400 words.
WORDS = "chunks=400"
MESSAGE = "Tell me something."


@pytest.fixture
def server() -> Iterator[ModelServer]:
    with serving() as server:
        yield server


@pytest.fixture(autouse=True)
def nothing_is_held(laws: None) -> Iterator[None]:
    yield
    assert Account.objects.get().held == 0


@pytest.fixture
def model(bench: Bench, server: ModelServer, settings: Any) -> Callable[..., str]:
    """Adds a model whose behaviour ``wish`` describes, and returns its name."""
    settings.MODEL_ATTEMPTS = 1

    def add(wish: str, kind: str = "openai", name: str = "priced", **fields: Any) -> str:
        provider, _ = Provider.objects.update_or_create(
            name=f"test {kind}", defaults={"kind": kind, "base_url": f"{server.url}/v1", "api_key": "made-up"}
        )
        prices = {"price_in": PRICE_IN, "price_out": PRICE_OUT, **fields}
        AgentModel.objects.create(name=name, display_name=name, provider=provider, provider_model=wish, **prices)
        catalogue.refresh()
        return name

    return add


def usage(run: dict[str, Any]) -> LedgerEntry:
    return LedgerEntry.objects.get(run_id=run["id"], type="USAGE")


def streamed(run: dict[str, Any]) -> str:
    return lifecycle.streamed_text(Run.objects.get(pk=run["id"]))


def output_cost(text: str) -> float:
    return len(text) / 4 / 1000 * PRICE_OUT


def sent_tokens(server: ModelServer) -> int:
    """About the tokens of the first request: of its instructions, tools and messages."""
    body = server.requests[0].body
    parts = [body.get(name) for name in ("instructions", "system", "tools", "messages", "input")]
    texts = [part for part in parts if part]
    assert len(texts) >= 2
    return len(json.dumps(texts, separators=(",", ":"))) // 4


def check_partial(row: LedgerEntry, came: str, input_tokens: int) -> None:
    """The charge is within 10 % of what came and 20 % of what was sent, and says which counts it has."""
    assert row.price["partial"] is True
    cost_in, cost_out = input_tokens / 1000 * PRICE_IN, output_cost(came)
    assert abs(row.amount - cost_in - cost_out) <= 0.2 * cost_in + 0.1 * cost_out


@pytest.mark.parametrize(
    ("kind", "percent"), [("openai", 25), ("openai", 99), ("openai_responses", 75), ("anthropic", 50)]
)
def test_a_cancelled_answer_is_charged_for_what_was_sent(bench, model, server, kind, percent):
    run = bench.start(MESSAGE, model=model(f"{WORDS}&fault=stall&at={percent}", kind))
    # All that the server sends before it is silent; a few of the first frames hold no words.
    until(lambda: len(streamed(run).split()) >= 4 * percent - 6)
    bench.cancel(run["id"])
    run = bench.wait(run["id"])
    assert run["status"] == "cancelled"
    sent = bench.content(run)
    # Anthropic counts what came in at the start of its answer, the others at the end.
    check_partial(usage(run), sent, INPUT_TOKENS if kind == "anthropic" else sent_tokens(server))


EARLY = {
    "time out of the run": ("fault=stall", {"django.conf.settings.RUN_TIMEOUT_SECONDS": 1}, "RUN_TIMEOUT"),
    "time out of the model": ("fault=stall", {"django.conf.settings.MODEL_TIMEOUT_SECONDS": 1}, "MODEL_TIMEOUT"),
    "silence": ("fault=stall", {"django.conf.settings.MODEL_STALL_SECONDS": 1}, "MODEL_TIMEOUT"),
    "cut": ("fault=cut&ms=1", {}, "MODEL_ERROR"),
    "error": ("fault=error", {}, "MODEL_ERROR"),
    "not JSON": ("fault=malformed", {}, "MODEL_ERROR"),
    "too long": ("ms=1", {"runs.llm.base.MODEL_OUTPUT_MAX_CHARS": 1000}, "MODEL_ERROR"),
}


@pytest.mark.parametrize("how", EARLY)
def test_a_turn_that_ends_early_is_charged_for_what_was_sent(bench, model, server, monkeypatch, how):
    wish, changes, code = EARLY[how]
    for name, value in changes.items():
        monkeypatch.setattr(name, value)
    run = bench.finish(MESSAGE, model=model(f"{WORDS}&{wish}"))
    assert (run["status"], run["errorCode"]) == ("failed", code)
    assert len(bench.content(run)) > 900
    check_partial(usage(run), bench.content(run), sent_tokens(server))
    assert run["totalCreditsUsed"] == usage(run).amount / 1_000_000


@pytest.mark.parametrize("kind", KINDS)
def test_a_filtered_answer_is_charged_by_the_counts_of_its_provider(bench, model, kind):
    run = bench.finish(MESSAGE, model=model(f"finish={'refusal' if kind == 'anthropic' else 'content_filter'}", kind))
    assert (run["status"], run["errorCode"]) == ("failed", "MODEL_ERROR")
    price = usage(run).price
    assert (price["partial"], price["inputTokens"], price["outputTokens"]) == (True, INPUT_TOKENS, OUTPUT_TOKENS)


def test_a_request_without_an_answer_costs_nothing(bench, model):
    for wish in ("status=400", "status=503", "fault=reset", "fault=empty", "fault=html"):
        run = bench.finish(MESSAGE, model=model(wish, name=wish))
        assert (run["status"], run["totalCreditsUsed"]) == ("failed", 0), wish
        rows = LedgerEntry.objects.filter(run_id=run["id"]).values_list("type", flat=True)
        assert sorted(rows) == ["HOLD", "RELEASE"], wish


# The first event of an answer, as it is sent before the model has said anything.
EMPTY_STARTS = {
    "anthropic": [
        {"type": "message_start", "message": {"usage": {"input_tokens": 21, "output_tokens": 1}}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}},
        {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}},
    ],
    "openai": [openai_delta(role="assistant", content="")],
    "openai_responses": [{"type": "response.created", "response": {"status": "in_progress"}}],
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_that_ends_before_its_first_word_costs_nothing(bench, model, server, settings, kind, monkeypatch):
    settings.MODEL_ATTEMPTS = 3
    monkeypatch.setattr("runs.llm.refusals.MODEL_RETRY_SECONDS", 0.001)
    server.raw = data(*EMPTY_STARTS[kind])
    run = bench.finish(MESSAGE, model=model("text=any", kind))
    assert (run["status"], run["totalCreditsUsed"], len(server.requests)) == ("failed", 0, 3)


NO_ANSWERS = {
    "another document": [b'{"status": "ok"}'],
    "another stream": data({"detail": "Not Found"}, "[DONE]"),
    "an end alone": data("[DONE]"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_answer_completes_no_turn(bench, model, server, kind):
    name = model("text=any", kind)
    for body, raw in NO_ANSWERS.items():
        server.raw = raw
        run = bench.finish(MESSAGE, model=name)
        assert (run["status"], run["errorCode"], run["totalCreditsUsed"]) == ("failed", "MODEL_ERROR", 0), body
        reason = Run.objects.get(pk=run["id"]).failure_reason
        assert reason in ("not_a_stream", "malformed_answer", "connection_lost"), body


@pytest.mark.parametrize("event", ["response.reasoning_text.delta", "response.reasoning_summary_text.delta"])
def test_an_answer_of_responses_has_begun_with_its_reasoning(bench, model, server, event):
    deltas = [{"type": event, "item_id": "rs_1", "output_index": 0, "delta": "one thought "} for _ in range(500)]
    server.raw = data(*EMPTY_STARTS["openai_responses"], *deltas)
    run = bench.finish(MESSAGE, model=model("text=any", "openai_responses"))
    assert (run["status"], run["errorCode"]) == ("failed", "MODEL_ERROR")
    check_partial(usage(run), "one thought " * 500, sent_tokens(server))


def test_what_comes_in_other_scripts_is_counted_by_its_bytes(bench, model, server):
    """About a token for each Chinese character, in and out; none of an estimate is more than a provider could count."""
    text = "\u597d" * 4000
    server.raw = data(openai_delta(content=text), *OPENAI_END)
    chat = bench.chat()
    first = usage(bench.wait(bench.start("Hi", chat, model=model("text=any"))["id"])).price
    second = usage(bench.wait(bench.start("Hi", chat, model="priced")["id"])).price
    assert (first["estimated"], first["outputTokens"]) == (True, 4000)
    assert 4000 <= second["inputTokens"] - first["inputTokens"] <= 4010


@pytest.mark.parametrize("end", ["vanish", *slow("shut down")])
def test_a_turn_whose_worker_ends_is_charged_for_the_recorded_text(bench, model, server, engines, end):
    run = bench.start(MESSAGE, model=model(f"{WORDS}&fault=stall"))
    until(lambda: len(streamed(run).split()) >= 190)
    sent = streamed(run)
    if end == "vanish":
        vanish(bench.engine)
    else:
        bench.engine.stop(0)
    AgentModel.objects.update(provider_model="text=ok")
    catalogue.refresh()
    engines()
    run = bench.wait(run["id"])
    assert (run["status"], bench.content(run)) == ("completed", "ok")
    partial, whole = LedgerEntry.objects.filter(run_id=run["id"], type="USAGE").order_by("created_at", "id")
    check_partial(partial, sent, sent_tokens(server))
    assert "partial" not in whole.price
    assert run["totalCreditsUsed"] * 1_000_000 == partial.amount + whole.amount


def test_a_fallback_with_other_prices_is_held_for_before_it_is_called(bench, model, server):
    """What the failed request used is charged at its own model's prices."""
    model("text=ok", name="dear", price_in=2_500_000, price_out=7_500_000)
    run = bench.finish(MESSAGE, model=model(f"{WORDS}&fault=cut&ms=1", fallbacks=["dear"]))
    assert (run["status"], run["resolvedModel"], bench.content(run)) == ("completed", "dear", "ok")
    rows = LedgerEntry.objects.filter(run_id=run["id"]).order_by("created_at", "id")
    first, second = (row for row in rows if row.type == "HOLD")
    assert [first.price["out"], second.price["out"]] == [PRICE_OUT, 7_500_000]
    assert second.amount == pytest.approx(5 * first.amount, rel=0.001)
    partial, whole = (row for row in rows if row.type == "USAGE")
    assert partial.price["model"] == "priced"
    check_partial(partial, "word100 " * 200, sent_tokens(server))
    assert whole.amount == INPUT_TOKENS * 2_500 + OUTPUT_TOKENS * 7_500


def test_a_fallback_that_the_credits_do_not_reach_for_is_not_called(bench, model, server):
    model("text=ok", name="dear", price_in=500_000_000, price_out=500_000_000)
    run = bench.finish(MESSAGE, model=model("status=503", fallbacks=["dear"]))
    assert (run["status"], run["errorCode"]) == ("failed", "INSUFFICIENT_CREDITS")
    assert [request.body["model"] for request in server.requests] == ["status=503"]


# Reported tokens in and out → those that are charged; None: an estimate.
COUNTS: list[tuple[Any, Any, int | None, int | None]] = [
    (21, 13, 21, 13),
    (0, 0, None, None),
    (0, 13, None, 13),
    (21, 0, 21, None),
    (-5, -7, None, None),
    ("21", "13", None, None),
    (None, None, None, None),
    (21.5, 1e9, None, None),
    (True, [13], None, None),
    (2**70, 2**70, None, None),
]


def test_counts_that_cannot_be_are_estimated(bench, model, server):
    text, name = "An answer of some length. " * 20, model("text=any")
    for case in COUNTS:
        reported_in, reported_out, counted_in, counted_out = case
        frames = [openai_delta(content=text), {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}]
        frames.append({"choices": [], "usage": {"prompt_tokens": reported_in, "completion_tokens": reported_out}})
        server.raw = data(*frames, "[DONE]")
        row = usage(bench.finish(MESSAGE, model=name))
        price = row.price
        expected_in = counted_in or pytest.approx(sent_tokens(server), rel=0.2)
        expected_out = counted_out or len(text) // 4
        assert (price["inputTokens"], price["outputTokens"]) == (expected_in, expected_out), case
        assert price.get("estimated", False) is (None in (counted_in, counted_out)), case
        assert row.amount == price["inputTokens"] * 500 + price["outputTokens"] * 1500, case


@pytest.mark.parametrize("reported", [(10**9, 10**9), (10**9, 1), (1, 10**9)])
def test_absurd_counts_are_charged_up_to_the_hold(bench, model, server, caplog, reported):
    frames = [openai_delta(content="ok"), {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}]
    frames.append({"choices": [], "usage": dict(zip(("prompt_tokens", "completion_tokens"), reported, strict=True))})
    server.raw = data(*frames, "[DONE]")
    run = bench.finish(MESSAGE, model=model("text=any"))
    hold = LedgerEntry.objects.get(run_id=run["id"], type="HOLD")
    assert (run["status"], usage(run).amount) == ("completed", hold.amount)
    assert Turn.objects.get().cost == hold.amount
    assert "more than its hold" in caplog.text


def test_counts_that_come_after_the_cancel_are_not_waited_for(bench, model, server):
    """The answer is complete but for its counts."""
    run = bench.start(MESSAGE, model=model(f"{WORDS}&fault=stall&at=100"))
    until(lambda: len(streamed(run).split()) == 400)
    bench.cancel(run["id"])
    run = bench.wait(run["id"])
    check_partial(usage(run), bench.content(run), sent_tokens(server))
