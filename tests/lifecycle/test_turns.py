"""The turns of a run: what each used and cost, with the text of its reasoning."""

import pytest

from runs import services
from runs.models import Turn
from runs.serializers import REASONING_SHOWN_CHARS

WITH_A_CALL = '/call calculate {"expression": "6*7"}\n/reason It is simple.\n/say {result}'
FORMS = {
    "chat completions": [{"field": "reasoning_content", "value": "It is simple."}],
    "reasoning details": [{"field": "reasoning_details", "value": [{"type": "x", "text": "It is simple."}]}],
    "anthropic": [{"item": {"type": "thinking", "thinking": "It is simple.", "signature": "s"}, "calls": 0}],
    "responses": [{"item": {"type": "reasoning", "summary": [{"type": "summary_text", "text": "It is simple."}]}}],
}


@pytest.mark.parametrize("surface", ["v1", "public/v1"])
def test_turns_are_shown_in_order_with_what_they_used(bench, session, public, surface):
    run = bench.finish(WITH_A_CALL)
    answer = (session if surface == "v1" else public).get(f"/api/{surface}/runs/{run['id']}/turns").json()
    first, second = answer["items"]
    assert (first["index"], second["index"], answer["nextCursor"]) == (1, 2, None)
    assert (first["finishReason"], second["finishReason"]) == ("tool_calls", "stop")
    assert first["reasoning"] is None
    assert second["reasoning"] == "It is simple."
    for name in ("inputTokens", "outputTokens", "cachedInputTokens"):
        assert first[name] + second[name] == run["usage"][name]
    calls = sum(call["creditUsed"] for call in run["toolInvocations"])
    assert first["creditUsed"] + second["creditUsed"] == pytest.approx(run["totalCreditsUsed"] - calls)


@pytest.mark.parametrize("form", FORMS)
def test_each_providers_form_of_reasoning_is_read(bench, session, form):
    run = bench.finish("Hello")
    Turn.objects.update(reasoning=FORMS[form])
    (turn,) = session.get(f"/api/v1/runs/{run['id']}/turns").json()["items"]
    assert turn["reasoning"] == "It is simple."


@pytest.mark.parametrize(
    ("items", "shown"),
    [
        ([{"item": {"type": "reasoning", "encrypted_content": "x" * 100}}], None),
        ([{"type": "reasoning", "text": "x" * 20_000}], "x" * REASONING_SHOWN_CHARS),
        ([{"type": "reasoning", "text": "x" * services.REASONING_READ_CHARS}], None),
        ([3, None, {"value": {"text": 5}}], None),
    ],
    ids=["encrypted", "long", "too long to read", "odd"],
)
def test_reasoning_is_bounded(bench, session, items, shown):
    run = bench.finish("Hello")
    Turn.objects.update(reasoning=items)
    (turn,) = session.get(f"/api/v1/runs/{run['id']}/turns").json()["items"]
    assert turn["reasoning"] == shown


def test_turns_of_a_deleted_chat_are_not_found(bench, session):
    run = bench.finish("Hello")
    session.delete(f"/api/v1/chats/{run['chatId']}")
    assert session.get(f"/api/v1/runs/{run['id']}/turns").status_code == 404
