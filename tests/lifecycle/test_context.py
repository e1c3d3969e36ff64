"""What the model receives of a chat: its transcript, which is shortened when it outgrows the model's window."""

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from config.kernel.money import MICRO
from credits.models import LedgerEntry
from runs import catalogue
from runs.errors import FailureReason
from runs.llm.base import ToolMessage
from runs.models import AgentModel, Compaction, ModelAttempt, Run, Turn
from runs.tools.base import ToolResult
from tests.driver import until
from tests.lifecycle.conftest import Bench, vanish
from tests.lifecycle.contexts import Provider, common, fill, in_chat, provider, rich, window  # noqa: F401

# ruff: noqa: F811 (fixtures)
pytestmark = pytest.mark.django_db(transaction=True)


def results(monkeypatch: pytest.MonkeyPatch, answer: Callable[[str], str]) -> None:
    """Make calls of ``calculate`` return ``answer(expression)``."""

    async def call(tool: Any, input: dict[str, Any], context: Any) -> ToolResult:
        return ToolResult(answer(input["expression"]))

    monkeypatch.setattr("runs.engine.calls.call_tool", call)


def call(expression: str) -> str:
    return "/call calculate " + json.dumps({"expression": expression})


@pytest.fixture(autouse=True)
def strict(provider: Provider) -> None:
    provider.knows_types = True


# --- the transcript --------------------------------------------------------------------------------------------------


def test_the_next_run_is_told_what_tools_returned(bench: Bench, provider: Provider):
    chat = bench.chat()
    in_chat(bench, chat, f"{call('6*7')}\n/say done")
    in_chat(bench, chat, "And then?")
    sent = provider.sent()
    assert "'42'" in sent
    assert "6*7" in sent


def test_a_later_request_begins_with_the_bytes_of_the_one_before(bench: Bench, provider: Provider):
    chat = bench.chat()
    for number in range(4):
        in_chat(bench, chat, f"{call(f'{number}+1')}\n/say so far {number}\n{call('2+2')}\n/say {{result}}")
    in_chat(bench, chat, "/say a\n/fail no")
    in_chat(bench, chat, "Hello")
    for earlier, later in pairwise(provider.turns):
        assert later.messages[: len(earlier.messages)] == earlier.messages
        assert later.tools == earlier.tools
    assert [tool.name for tool in provider.turns[0].tools] == sorted(tool.name for tool in provider.turns[0].tools)


def test_runs_that_ended_early_are_in_a_form_that_every_provider_accepts(bench: Bench, provider: Provider, monkeypatch):
    """Cancelled during a call and a stream, failed, refused, lost calls; the provider checks each request."""
    chat = bench.chat()
    in_chat(bench, chat, "/say so far\n/fail no")
    in_chat(bench, chat, "/call nothing {}\n/call calculate {broken\n/say then")
    run = bench.start("/say a\n/wait 60", chat)
    until(lambda: bench.get(run["id"])["lastStreamIndex"] >= 3)
    bench.cancel(run["id"])
    bench.wait(run["id"])
    run = bench.start("/ask Which?", chat)
    bench.wait(run["id"], "waiting")
    bench.cancel(run["id"])
    in_chat(bench, chat, "/overflow")
    assert in_chat(bench, chat, "Go on")["status"] == "completed"
    roles = [type(message).__name__ for message in provider.turns[-1].messages]
    assert all(pair != ("UserMessage", "UserMessage") for pair in pairwise(roles))
    sent = provider.sent()
    assert "so far" in sent
    assert "UNKNOWN_TOOL" in sent
    assert "CANCELLED: The call did not end." in sent


def test_no_more_runs_than_the_setting(bench: Bench, provider: Provider, monkeypatch):
    monkeypatch.setattr("runs.engine.history.RUN_HISTORY_RUNS", 2)
    chat = bench.chat()
    for number in range(5):
        in_chat(bench, chat, f"number {number}")
    sent = provider.sent()
    assert [f"number {number}" in sent for number in range(5)] == [False, False, True, True, True]


def test_a_note_of_a_result_has_the_same_bytes_in_the_next_run(bench: Bench, provider: Provider, window, monkeypatch):
    """Addresses that the result names already do not count, whether the result was loaded or not."""

    async def call_tool(tool: Any, input: dict[str, Any], context: Any) -> ToolResult:
        url = "https://example.com/page"
        return ToolResult(f"see {url} " + "z" * 6000, urls=[url])

    window(8000, 1000)
    monkeypatch.setattr("runs.engine.calls.call_tool", call_tool)
    chat = bench.chat()
    for _ in range(6):
        in_chat(bench, chat, f"{call('1')}\n/say ok")
    notes = [
        message.content
        for request in provider.turns
        for message in request.messages
        if isinstance(message, ToolMessage) and message.content.startswith("[A result")
    ]
    assert len(notes) > 4
    assert set(notes) == {"[A result of 6029 characters, which is no longer shown.]"}


def test_a_run_of_ten_turns_pays_most_of_its_input_at_the_cached_price(bench: Bench, provider: Provider):
    AgentModel.objects.update(price_in=500_000, price_cached_in=50_000, price_out=1_500_000)
    catalogue.refresh()
    provider.caches = True
    run = bench.finish("\n".join(f"{call(f'{number}+1')}\n/say next" for number in range(9)))
    usage = run["usage"]
    assert usage["turns"] == 10
    assert usage["cachedInputTokens"] >= 0.8 * usage["inputTokens"]
    turns = Turn.objects.filter(run_id=run["id"])
    exact = sum(turn.cached_tokens * 50 + (turn.input_tokens - turn.cached_tokens) * 500 + 1500 for turn in turns)
    tools = sum(used["creditUsed"] for used in run["toolInvocations"])
    assert round(run["totalCreditsUsed"] * MICRO) == exact + round(tools * MICRO)


# --- the window ------------------------------------------------------------------------------------------------------


def plant(number: int) -> str:
    """A run of about 2 KB whose tool result has a fact."""
    return f"{call(f'fact{number}')}\n/say {'word ' * 100}\n{'padding ' * 60}"


def test_a_chat_that_outgrows_the_window_continues(bench, provider, window, monkeypatch):
    """Several summaries, each of the one before, and more runs than are read of a chat."""
    window(8000)
    monkeypatch.setattr("runs.engine.history.RUN_HISTORY_RUNS", 20)
    runs = 25
    results(monkeypatch, lambda expression: f"The code of {expression} is Q{expression}Q. " + "x" * 500)
    chat = bench.chat()
    in_chat(bench, chat, "remember: the user is called Ada")
    for number in range(runs):
        run = in_chat(bench, chat, plant(number))
        assert run["status"] == "completed", run
        recent = range(max(0, number - 1), number + 1)
        assert all(f"Qfact{fact}Q" in provider.sent() for fact in recent)
    assert provider.refused == 0
    kinds = list(Compaction.objects.values_list("kind", flat=True))
    assert kinds.count("summary") >= 2
    assert "Ada" in provider.sent()
    assert len(kinds) < runs / 2
    texts = [provider.prefix(request) for request in provider.turns]
    shares = [common(*pair) / len(pair[0]) for pair in pairwise(texts)]
    assert sum(share < 0.95 for share in shares) <= len(kinds)
    run = Run.objects.get(pk=Compaction.objects.filter(kind="summary").last().run_id)
    used = LedgerEntry.objects.filter(run_id=run.pk, type="USAGE")
    assert used.count() == run.turn_count + Compaction.objects.filter(run=run, held__gt=0).count()


@pytest.mark.slow
def test_one_run_with_long_results_stays_within_the_window(bench, provider, window, monkeypatch):
    window(128_000, 4096)
    results(monkeypatch, lambda expression: f"{expression} " * (100_000 // (len(expression) + 1)))
    run = bench.finish("\n".join(f"{call(f'n{number}')}\n/say next" for number in range(15)))
    assert (run["status"], run["usage"]["turns"]) == ("completed", 16)
    assert provider.refused == 0
    assert "n14 n14" in provider.sent()
    assert "n13 n13" in provider.sent()
    assert "[A result of 99999 characters, which is no longer shown.]" in provider.sent()
    assert 0 < Compaction.objects.count() < 9


def test_a_window_smaller_than_one_result(bench, provider, window, monkeypatch):
    window(8000)
    results(monkeypatch, lambda expression: "begin " + f"{expression} " * 30_000)
    run = bench.finish("\n".join(f"{call(f'n{number}')}\n/say next" for number in range(5)))
    assert run["status"] == "completed"
    assert provider.refused == 0
    assert "begin n4" in provider.sent()


def test_results_after_those_that_filled_the_window_are_whole(bench, provider, window, monkeypatch):
    """A batch of results is cut; later ones of the run are not, also after another batch."""
    window(20_000, 1000)
    results(monkeypatch, lambda expression: "big " * 25_000 if expression == "1" else "y" * 3000 + "END")
    batch = "\n".join([call("1")] * 20)
    bench.finish("\n/say next\n".join([batch, call("2"), call("3"), batch, call("4")]))
    last = [[m for m in request.messages if isinstance(m, ToolMessage)][-1].content for request in provider.turns[1:]]
    assert [len(content) for content in (last[1], last[2], last[4])] == [3003] * 3
    assert all(len(last[at]) < 5000 and "has 100000 characters" in last[at] for at in (0, 3))
    assert provider.refused == 0


def test_the_next_run_after_one_that_filled_the_window(bench, provider, window, monkeypatch):
    window(8000)
    results(monkeypatch, lambda expression: f"begin {expression} " * 20_000)
    chat = bench.chat()
    for _ in range(2):
        in_chat(bench, chat, "\n".join(f"{call(f'n{number}')}\n/say next" for number in range(5)))
        assert in_chat(bench, chat, "Hello")["status"] == "completed"
    assert provider.refused == 0


def test_dense_text_is_learned_from_reports(bench, provider, window):
    window(20_000, 1000)
    provider.bytes_per_token = 1.5
    chat = bench.chat()
    for _ in range(20):
        run = in_chat(
            bench, chat, f"/usage {int(provider.tokens(provider.turns[-1])) if provider.turns else 0} 9\n" + "字" * 600
        )
        assert run["status"] == "completed"


def test_a_refusal_as_too_long_compacts_and_tries_again(bench, provider, window):
    window(3000, 500, believed=100_000)
    provider.window = 0
    chat = bench.chat()
    fill(bench, chat)
    provider.window = 3000
    run = in_chat(bench, chat, "And now?")
    assert (run["status"], run["usage"]["modelRetries"]) == ("completed", 1)
    assert ModelAttempt.objects.get(compaction=0).reason == "context_too_long"
    assert Compaction.objects.exists()
    assert "remember number 0" in provider.sent()


def test_only_the_shortest_form_fails(bench, provider, window):
    window(3000, 500)
    chat = bench.chat()
    in_chat(bench, chat, "word " * 200)
    run = in_chat(bench, chat, "/overflow")
    assert run["errorCode"] == "CONTEXT_LENGTH_EXCEEDED"
    last = provider.turns[-1].messages
    assert [getattr(message, "text", "")[:9] for message in last] == ["[The earl", "Understoo", "/overflow"]
    assert in_chat(bench, chat, "Hello")["status"] == "completed"
    assert "word word" in provider.sent()


def test_a_message_that_no_window_can_hold_is_refused_without_a_request(bench, provider, window):
    window(1000, 200)
    chat = bench.chat()
    in_chat(bench, chat, "word " * 100)
    provider.requests.clear()
    run = in_chat(bench, chat, "x" * 8001)
    assert run["errorCode"] == "CONTEXT_LENGTH_EXCEEDED"
    assert provider.requests == []
    assert (run["usage"]["modelRetries"], ModelAttempt.objects.count()) == (0, 1)
    run = bench.finish("x" * 8000)
    assert (run["errorCode"], len(provider.requests)) == ("CONTEXT_LENGTH_EXCEEDED", 1)


# --- summaries -------------------------------------------------------------------------------------------------------


def test_two_queued_runs_share_one_summary(bench, provider, window):
    window(100_000, 500)
    chat = bench.chat()
    fill(bench, chat)
    window(3000, 500)
    first = bench.start("/wait 0.2\n/say a", chat)
    second = bench.start("/say b", chat, onActiveRun="enqueue")
    assert [bench.wait(run["id"])["status"] for run in (first, second)] == ["completed", "completed"]
    assert set(Compaction.objects.values_list("run_id", flat=True)) == {first["id"]}
    assert (len(provider.summaries), provider.refused) == (1, 0), "a summary reads no more than its model can"
    assert "remember number 0" in provider.sent()


def test_staff_choose_the_model_that_summarises(bench, provider, window, settings):
    demo = AgentModel.objects.get()
    demo.pk, demo.name, demo.is_default, demo.price_in = None, "cheap", False, 1000
    demo.save()
    settings.RUN_SUMMARY_MODEL = "cheap"
    window(100_000, 500)
    chat = bench.chat()
    fill(bench, chat)
    window(3000, 500)
    in_chat(bench, chat, "Hello")
    assert {request.model.name for request in provider.summaries} == {"cheap"}
    assert Compaction.objects.filter(kind="summary").first().model == "cheap"


@pytest.mark.parametrize("passes", [True, False])
def test_without_a_summary_the_runs_are_left_out(bench, provider, window, settings, passes, monkeypatch):
    monkeypatch.setattr("runs.llm.refusals.MODEL_RETRY_SECONDS", 0)
    settings.MODEL_ATTEMPTS = 2
    window(100_000, 500)
    chat = bench.chat()
    fill(bench, chat)
    window(3000, 500)
    reason = FailureReason.PROVIDER_UNAVAILABLE if passes else FailureReason.CONTENT_FILTERED
    provider.fails = [reason] if passes else [reason] * 9
    assert in_chat(bench, chat, "Hello")["status"] == "completed"
    first = Compaction.objects.first()
    assert (first.kind, first.failure_reason) == (("summary", "") if passes else ("left_out", "content_filtered"))
    assert ("number 0" in provider.sent()) == passes
    assert "number 5" in provider.sent()


def test_a_run_whose_credits_do_not_reach_for_the_summary_ends_before_it(bench, provider, window):
    window(100_000, 500)
    chat = bench.chat()
    fill(bench, chat)
    window(3000, 500)
    run = in_chat(bench, chat, "Hello", maxCredits=0.1)
    assert (run["errorCode"], run["totalCreditsUsed"]) == ("BUDGET_EXCEEDED", 0)


def test_a_worker_that_is_lost_during_a_summary(bench, provider, window, engines, monkeypatch):
    window(100_000, 500)
    chat = bench.chat()
    fill(bench, chat)
    window(3000, 500)
    monkeypatch.setattr("runs.engine.context.fit.lifecycle.crash_point", lambda name: died.append(name))
    died: list[str] = []
    run = in_chat(bench, chat, "Hello")
    assert run["status"] == "completed"
    assert {"before_summary", "after_summary"} <= set(died)
    vanish(bench.engine)
    engines()
    assert in_chat(bench, chat, "Again")["status"] == "completed"
