"""What each stream event is in the AI SDK's protocol."""

from decimal import Decimal
from typing import Any

import pytest

from runs.fronts.ai_sdk.chunks import Chunks
from runs.fronts.rendering import Call
from runs.models import Run
from runs.serializers import UsageSerializer
from tests.fronts.conftest import Feed

DRAW = {"toolInvocationId": "inv_1", "name": "draw_chart", "turnIndex": 1, "callIndex": 1, "status": "DISPATCHING"}
RUN = Run(
    id="run_1", chat_id="chat_1", assistant_message_id="msg_1", status="completed", finish_reason="stop", turn_count=2
)
RUN.credits_spent = 12_500_000
APPROVAL = {
    "id": "wp_1",
    "kind": "CREDIT_APPROVAL",
    "requestPayload": {"toolName": "draw_chart", "estimatedCredits": 12, "threshold": 10, "toolInvocationId": "inv_1"},
    "expiresAt": "2027-01-01T00:00:00.000Z",
}


@pytest.fixture
def feed() -> Feed:
    made = Feed(Chunks(Run(id="run_1", chat_id="chat_1")))
    assert made("run.status", status="queued") == []
    (start,) = made("run.status", RUN, status="running")
    assert start == {"type": "start", "messageId": "msg_1", "messageMetadata": {"runId": "run_1", "chatId": "chat_1"}}
    return made


def types(parts: list[Any]) -> list[str]:
    return [part["type"] for part in parts]


def done(feed: Feed, status: str = "completed", **data: Any) -> list[Any]:
    return feed("run.status", RUN, final=True, status=status, **data)


def test_text_and_calls_of_two_turns(feed):
    begun = feed("message.delta", text="Let me")
    assert begun[1:] == [{"type": "text-start", "id": "t1"}, {"type": "text-delta", "id": "t1", "delta": "Let me"}]
    called = feed("tool.started", **DRAW, input={"t": 1})
    assert called[1:] == [
        {
            "type": "tool-input-available",
            "toolCallId": "inv_1",
            "toolName": "draw_chart",
            "input": {"t": 1},
            "dynamic": True,
            "providerExecuted": True,
        }
    ]
    (output,) = feed("tool.completed", **DRAW | {"status": "COMPLETED", "result": "drawn"})
    assert (output["type"], output["output"]) == ("tool-output-available", "drawn")
    second = feed("message.delta", text="\n\nHere it is")
    assert types(second) == ["finish-step", "start-step", "text-start", "text-delta"]
    assert second[-1]["delta"] == "Here it is"
    ended = done(feed)
    assert types(ended) == ["text-end", "finish-step", "finish"]
    about = {"runId": "run_1", "status": "completed", "creditsUsed": 12.5, "usage": UsageSerializer(RUN).data}
    assert ended[-1] == {"type": "finish", "finishReason": "stop", "messageMetadata": about}
    assert feed.rendering.over


def test_numbers_keep_their_digits(feed):
    given = {"x": Decimal("0.1234567890123456789")}
    assert feed("tool.started", **DRAW, input=given)[-1]["input"] == given


def test_an_approval_ends_the_stream(feed):
    asked = feed("waitpoint.opened", Call("inv_1", "draw_chart", 1, {"t": 1}), **APPROVAL)
    assert types(asked) == ["start-step", "tool-input-available", "tool-approval-request", "finish-step", "finish"]
    assert asked[2] == {
        "type": "tool-approval-request",
        "approvalId": "wp_1",
        "toolCallId": "inv_1",
        "reason": "12 credits, over 10",
        "approvalDescriptor": {"estimatedCredits": 12, "threshold": 10, "expiresAt": "2027-01-01T00:00:00.000Z"},
    }
    assert asked[-1] == {"type": "finish", "finishReason": "tool-calls"}
    assert feed.rendering.over


def test_an_answered_approval_is_no_question_any_more(feed):
    call = Call("inv_1", "draw_chart", 1, {"t": 1})
    asked = feed("waitpoint.opened", call, how={"asks": False}, **APPROVAL)
    assert types(asked) == ["start-step", "tool-input-available"]
    assert feed("waitpoint.resolved", **APPROVAL) == feed("tool.started", **DRAW, input={"t": 1}) == []
    assert not feed.rendering.over
    assert feed("tool.completed", **DRAW | {"status": "REFUSED"}) == [
        {"type": "tool-output-denied", "toolCallId": "inv_1"}
    ]


def test_a_question_is_a_call_of_the_client(feed):
    call = Call("inv_2", "ask_user", 1, {"question": "When?"}, "client")
    waitpoint = {"id": "wp_2", "kind": "CLARIFICATION", "requestPayload": {"question": "When?"}, "expiresAt": ""}
    asked = feed("waitpoint.opened", call, **waitpoint)
    assert types(asked) == ["start-step", "tool-input-available", "finish-step", "finish"]
    assert "providerExecuted" not in asked[1]
    assert asked[1]["input"] == {"question": "When?"}


def test_a_wait_for_credits_is_a_call_of_its_own(feed):
    waitpoint = APPROVAL | {
        "requestPayload": {"toolName": "model", "estimatedCredits": 2, "threshold": 1, "reason": "X"}
    }
    asked = feed("waitpoint.opened", **waitpoint)
    assert (asked[1]["toolCallId"], asked[1]["toolName"]) == ("wp_1", "model")
    assert asked[2]["reason"] == "2 credits, 1 left"
    (output,) = feed("waitpoint.resolved", **waitpoint, resolvedPayload={"approved": True, "by": "grant"})
    assert (output["toolCallId"], output["output"]) == ("wp_1", {"approved": True, "by": "grant"})


def test_calls_of_the_client_are_left_to_it(feed):
    client = DRAW | {"name": "locate", "input": {}, "awaiting": "client"}
    shown = feed("tool.started", **client)
    assert "providerExecuted" not in shown[-1]
    feed("tool.started", **DRAW | {"toolInvocationId": "inv_2", "input": {}})
    assert not feed.rendering.awaits_client
    feed("tool.completed", **DRAW | {"toolInvocationId": "inv_2", "status": "COMPLETED", "result": "x"})
    assert feed.rendering.awaits_client
    assert feed.rendering.stop_for_client()[-1] == {"type": "finish", "finishReason": "tool-calls"}


@pytest.mark.parametrize(("result", "output"), [('{"lat": 1}', {"lat": 1}), ("here", "here"), ('"here"', '"here"')])
def test_the_output_of_a_client_is_the_value_that_it_gave(feed, result, output):
    client = DRAW | {"awaiting": "client"}
    feed("tool.started", **client, input={})
    (shown,) = feed("tool.completed", **client | {"status": "COMPLETED", "result": result})
    assert shown["output"] == output


def test_a_parked_call_has_a_preliminary_output(feed):
    parked = {name: DRAW[name] for name in ("toolInvocationId", "name", "turnIndex", "callIndex")}
    feed("tool.started", **DRAW, input={})
    (output,) = feed("tool.parked", **parked, awaiting="tool", expiresAt="later")
    assert output["preliminary"]
    assert output["output"] == {"status": "parked", "fraction": None, "message": None, "expiresAt": "later"}
    (output,) = feed("tool.progress", toolInvocationId="inv_1", name="draw_chart", fraction=0.5, message="half", at="")
    assert (output["output"]["fraction"], output["output"]["message"]) == (0.5, "half")
    assert output["output"]["expiresAt"] == "later"


@pytest.mark.parametrize(("status", "text"), [("FAILED", "It broke."), ("CANCELLED", None)])
def test_a_call_that_failed_before_it_was_made(feed, status, text):
    data = DRAW | {"status": status, "input": {"t": 1}, "errorMessage": text}
    shown = feed("tool.completed", **data)
    assert types(shown) == ["start-step", "tool-input-available", "tool-output-error"]
    assert (shown[1]["input"], shown[2]["errorText"]) == ({"t": 1}, text or "The call was cancelled.")


def test_a_reset_voids_the_text_of_its_turn_alone(feed):
    feed("message.delta", text="First")
    feed("tool.started", **DRAW, input={})
    feed("tool.completed", **DRAW | {"status": "COMPLETED", "result": "x"})
    feed("message.delta", text="\n\nSecond, wr")
    assert feed("message.reset", messageId="msg_1") == [{"type": "reset-step"}]
    assert feed("message.delta", text="First") == []
    again = feed("message.delta", text="\n\nSecond, right")
    assert types(again) == ["text-start", "text-delta"]
    assert again[-1]["delta"] == "Second, right"
    assert feed("model.retrying", attempt=1)[0]["transient"]


def test_a_reset_of_nothing_is_nothing(feed):
    assert feed("message.reset", messageId="msg_1") == []


def test_overtaken_text_is_left_out_with_its_reset(feed):
    assert feed("message.delta", text="wrong", how={"overtaken": True}) == []
    assert feed("message.reset", messageId="msg_1") == []
    assert types(feed("message.delta", text="right")) == ["start-step", "text-start", "text-delta"]


def test_ends(feed):
    feed("message.delta", text="Half")
    ended = done(feed, "failed", errorCode="MODEL_ERROR", errorMessage="The model failed.")
    assert types(ended) == ["text-end", "finish-step", "message-metadata", "error"]
    assert ended[2]["messageMetadata"] == {"status": "failed", "errorCode": "MODEL_ERROR"}
    assert ended[3]["errorText"] == "The model failed."


def test_a_cancel(feed):
    assert done(feed, "cancelled") == [
        {"type": "abort", "reason": "cancelled"},
        {"type": "finish", "finishReason": "other"},
    ]
