"""The rendering of stream events as AG-UI, without a database: what the official client would keep, and refuse."""

from typing import Any

import pytest

from config.kernel.jsontext import to_text
from runs.events import StreamType
from runs.fronts.ag_ui.events import AgUi, tool_call, tool_message
from runs.fronts.rendering import Call, Facts
from runs.models import Run
from runs.streams.reads import Event

# The event's type and data, and the facts about it.
Given = tuple[str, dict[str, Any], Facts]
ENDS = ("RUN_FINISHED", "RUN_ERROR")


def status(value: str, **more: Any) -> Given:
    run = Run(id="run_1", assistant_message_id="msg_1", input_tokens=3, output_tokens=2, cached_input_tokens=1)
    run.credits_spent = 1_000_000
    return StreamType.RUN_STATUS, {"status": value, **more}, run


def delta(text: str) -> Given:
    return StreamType.MESSAGE_DELTA, {"text": text}, None


def started(call: str, turn: int = 1, name: str = "calculate", **more: Any) -> Given:
    data = {"toolInvocationId": call, "name": name, "turnIndex": turn, "input": {"a": 1}, **more}
    return StreamType.TOOL_STARTED, data, None


def completed(call: str, turn: int = 1, state: str = "COMPLETED", **more: Any) -> Given:
    data = {"toolInvocationId": call, "name": "calculate", "turnIndex": turn, "status": state, "result": "2"}
    return StreamType.TOOL_COMPLETED, data | more, None


def parked(call: str, awaiting: str) -> Given:
    data = {"toolInvocationId": call, "name": "pick", "turnIndex": 1, "awaiting": awaiting}
    return "tool.parked", data | {"expiresAt": "2027-01-01T00:00:00.000Z"}, None


def approval(call: str | None = "inv_1", turn: int = 1, **payload: Any) -> Given:
    asked = {"toolName": "draw_chart", "estimatedCredits": 12, "threshold": 10, "input": {"t": 1}} | payload
    about = Call(call, "draw_chart", turn, asked["input"]) if call else None
    waitpoint = {"id": "wp_1", "kind": "CREDIT_APPROVAL", "expiresAt": "2027-01-01T00:00:00.000Z"}
    return StreamType.WAITPOINT_OPENED, waitpoint | {"requestPayload": asked}, about


BEFORE = AgUi(Run()).snapshot([{"id": "before"}])
RESET: Given = (StreamType.MESSAGE_RESET, {"messageId": "msg_1"}, BEFORE)
END = [(StreamType.MESSAGE_COMPLETED, {"messageId": "msg_1", "content": ""}, None), status("completed")]


def rendering() -> AgUi:
    run = Run(id="run_1", chat_id="chat_1", assistant_message_id="msg_1")
    new = AgUi(run, "thread", "name")
    new.resumed()
    return new


def render(*happened: Given, by: AgUi | None = None) -> list[dict[str, Any]]:
    by = by or rendering()
    events: list[Any] = []
    for index, (kind, data, facts) in enumerate(happened, 1):
        final = data.get("status") in ("completed", "failed", "cancelled") and kind == StreamType.RUN_STATUS
        events += by.feed(Event(index, kind, to_text(data), final), facts)
        by.over = False
    return events


def type_of(event: Any) -> str:
    return "MESSAGES_SNAPSHOT" if event == BEFORE else event["type"]


def check(events: list[dict[str, Any]]) -> None:
    """The rules of the client's verification that an event stream can break."""
    opened: set[str] = set()
    for position, event in enumerate(events):
        kind = type_of(event)
        assert kind not in ENDS or position == len(events) - 1
        if kind == "TEXT_MESSAGE_START":
            assert event["messageId"] not in opened
            opened.add(event["messageId"])
        elif kind.startswith("TEXT_MESSAGE"):
            assert event["messageId"] in opened
            opened -= {event["messageId"]} if kind == "TEXT_MESSAGE_END" else set()
        elif kind == "RUN_FINISHED":
            assert not opened


class Client:
    """Builds messages from AG-UI events as the official client does."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.texts: list[str] = []

    def take(self, events: list[Any]) -> None:
        for event in events:
            if isinstance(event, str):  # a snapshot: the text of this turn is void
                self.messages.pop()
                continue
            match event["type"]:
                case "TEXT_MESSAGE_START":
                    self._assistant(event["messageId"])
                case "TEXT_MESSAGE_CONTENT":
                    self.texts.append(event["delta"])
                case "TEXT_MESSAGE_END":
                    self.end_text()
                case "TOOL_CALL_START":
                    call = tool_call(event["toolCallId"], event["toolCallName"])
                    self._assistant(event["parentMessageId"]).setdefault("toolCalls", []).append(call)
                case "TOOL_CALL_ARGS":
                    call["function"]["arguments"] = event["delta"]
                case "TOOL_CALL_RESULT":
                    self.messages.append(tool_message(event["toolCallId"], event["content"]))

    def end_text(self) -> None:
        if self.texts:
            self.messages[-1]["content"] = "".join(self.texts)
            self.texts.clear()

    def _assistant(self, message_id: str) -> dict[str, Any]:
        """The message with this id, or a new one. Only results of its calls can be after the message."""
        last = next((message for message in reversed(self.messages) if message["role"] != "tool"), None)
        if last is not None and last["id"] == message_id:
            return last
        self.messages.append({"id": message_id, "role": "assistant"})
        return self.messages[-1]


def conversation(*happened: Given) -> list[dict[str, Any]]:
    """The messages that the client has in the end."""
    events = render(*happened)
    check(events)
    seen = Client()
    seen.take(events)
    return seen.messages


def texts(*happened: Given) -> dict[str, str]:
    return {message["id"]: message["content"] for message in conversation(*happened) if "content" in message}


def test_an_answer_is_one_message() -> None:
    events = render(status("queued"), status("running"), delta("Hel"), delta("lo"), *END)
    assert [event["type"] for event in events] == [
        "TEXT_MESSAGE_START",
        "TEXT_MESSAGE_CONTENT",
        "TEXT_MESSAGE_CONTENT",
        "TEXT_MESSAGE_END",
        "RUN_FINISHED",
    ]
    assert events[-1] == {
        "type": "RUN_FINISHED",
        "threadId": "thread",
        "runId": "name",
        "result": {"runId": "run_1", "creditsUsed": 1, "output": None},
        "usage": [{"inputTokens": 3, "outputTokens": 2, "cachedInputTokens": 1, "totalTokens": 5}],
    }


def test_each_turn_is_a_message_with_its_calls() -> None:
    said = conversation(
        delta("A"), started("inv_1"), started("inv_2"), completed("inv_2"), completed("inv_1"), delta("\n\nB"), *END
    )
    calls = [
        {"id": call, "type": "function", "function": {"name": "calculate", "arguments": '{"a":1}'}}
        for call in ("inv_1", "inv_2")
    ]
    assert said == [
        {"id": "msg_1", "role": "assistant", "content": "A", "toolCalls": calls},
        {"id": "inv_2.result", "role": "tool", "toolCallId": "inv_2", "content": "2"},
        {"id": "inv_1.result", "role": "tool", "toolCallId": "inv_1", "content": "2"},
        {"id": "msg_1.2", "role": "assistant", "content": "B"},
    ]


def test_a_turn_without_text_counts() -> None:
    said = conversation(
        *(started("inv_1"), completed("inv_1"), started("inv_2", turn=2), completed("inv_2", turn=2), delta("B"), *END)
    )
    assert [message["id"] for message in said] == ["msg_1", "inv_1.result", "msg_1.2", "inv_2.result", "msg_1.3"]
    assert said[-1]["content"] == "B"


def test_a_reset_voids_the_text_of_its_turn_only() -> None:
    happened = [
        *(delta("A"), started("inv_1"), completed("inv_1"), delta("\n\nflaky")),
        *(RESET, delta("A"), (StreamType.MODEL_RETRYING, {"attempt": 1}, None), delta("\n\nB"), *END),
    ]
    events = render(*happened)
    after = [type_of(event) for event in events[events.index(BEFORE) - 1 :]]
    assert after == [
        *("TEXT_MESSAGE_END", "MESSAGES_SNAPSHOT", "CUSTOM"),
        *("TEXT_MESSAGE_START", "TEXT_MESSAGE_CONTENT", "TEXT_MESSAGE_END", "RUN_FINISHED"),
    ]
    assert texts(*happened) == {"msg_1": "A", "inv_1.result": "2", "msg_1.2": "B"}


def test_a_reset_ends_no_message_that_began_before_the_stream() -> None:
    state = AgUi(Run(id="run_1", chat_id="chat_1", assistant_message_id="msg_1"))
    render(delta("flaky"), by=state)  # in the snapshot of the stream
    state.resumed()
    assert render(RESET, by=state) == [BEFORE]


@pytest.mark.parametrize("parts", [["A\n\nB"], ["A", "\n\nB"], list("A\n\nB")])
def test_a_reset_of_a_first_turn_begins_the_message_again(parts: list[str]) -> None:
    assert texts(delta("flaky"), RESET, *map(delta, parts), *END) == {"msg_1": "A\n\nB"}


def test_a_worker_that_takes_over_says_the_recorded_text_once_more() -> None:
    turn = [delta("A"), started("inv_1"), completed("inv_1")]
    assert texts(*turn, delta("\n\nx"), RESET, delta("A"), RESET, delta("A"), delta("\n\nB"), *END)["msg_1.2"] == "B"


def test_the_text_of_a_run_whose_events_are_gone_is_whole() -> None:
    assert texts(delta("all of it"), *END) == {"msg_1": "all of it"}


def test_an_approval_interrupts_and_the_next_run_continues() -> None:
    state = rendering()
    events = render(delta("Let me"), approval(), by=state)
    check(events)
    assert [event["type"] for event in events[2:]] == [
        *("TEXT_MESSAGE_END", "TOOL_CALL_START", "TOOL_CALL_ARGS", "TOOL_CALL_END", "RUN_FINISHED")
    ]
    assert events[3]["parentMessageId"] == "msg_1"
    (interrupt,) = events[-1]["outcome"]["interrupts"]
    assert interrupt == {
        "id": "wp_1",
        "reason": "credit_approval",
        "message": "draw_chart costs 12 credits",
        "toolCallId": "inv_1",
        "responseSchema": {
            "type": "object",
            "properties": {"approved": {"type": "boolean"}, "reason": {"type": "string"}},
            "required": ["approved"],
        },
        "expiresAt": "2027-01-01T00:00:00.000Z",
        "metadata": {"estimatedCredits": 12, "threshold": 10},
    }
    continued = render(
        *(status("waiting"), status("queued"), status("running"), started("inv_1", name="draw_chart")),
        *(completed("inv_1"), delta("\n\nHere"), *END),
        by=state,
    )
    assert [event["type"] for event in continued] == [
        *("TOOL_CALL_RESULT", "TEXT_MESSAGE_START", "TEXT_MESSAGE_CONTENT", "TEXT_MESSAGE_END", "RUN_FINISHED")
    ]
    assert continued[0] == {
        "type": "TOOL_CALL_RESULT",
        "messageId": "inv_1.result",
        "toolCallId": "inv_1",
        "role": "tool",
        "content": "2",
    }
    assert continued[2] == {"type": "TEXT_MESSAGE_CONTENT", "messageId": "msg_1.2", "delta": "Here"}


def test_a_run_that_waits_for_credits_interrupts_without_a_call() -> None:
    (finished,) = render(approval(None, toolName="model", reason="BUDGET_EXCEEDED", topUpUrl=None))
    (interrupt,) = finished["outcome"]["interrupts"]
    assert "toolCallId" not in interrupt
    assert interrupt["message"] == "model needs 12 credits"
    assert interrupt["metadata"]["reason"] == "BUDGET_EXCEEDED"


@pytest.mark.parametrize(
    ("asked", "name", "schema"),
    [
        ({}, "answer", {"type": "string"}),
        ({"options": ["a", "b"]}, "answer", {"type": "string", "enum": ["a", "b"]}),
        ({"schema": {"type": "object"}}, "data", {"type": "object"}),
    ],
)
def test_a_question_interrupts(asked: dict[str, Any], name: str, schema: dict[str, Any]) -> None:
    waitpoint = {"id": "wp_1", "kind": "CLARIFICATION", "expiresAt": "2027-01-01T00:00:00.000Z"}
    payload = {"question": "Which day?", **asked}
    (finished,) = render((StreamType.WAITPOINT_OPENED, waitpoint | {"requestPayload": payload}, None))
    (interrupt,) = finished["outcome"]["interrupts"]
    assert (interrupt["reason"], interrupt["message"]) == ("clarification", "Which day?")
    expected = {"type": "object", "properties": {name: schema}, "required": [name]}
    assert interrupt["responseSchema"] == expected


def test_the_clients_calls_end_the_run_once_nothing_else_is_open() -> None:
    state = rendering()
    render(started("inv_1", awaiting="client"), started("inv_2"), parked("inv_1", "client"), by=state)
    assert not state.awaits_client
    render(completed("inv_2"), by=state)
    assert state.awaits_client
    (finished,) = state.stop_for_client()
    assert finished["outcome"] == {"type": "success", "pendingToolCallIds": ["inv_1"]}
    continued = render(completed("inv_1"), delta("B"), *END, by=state)
    assert continued[0]["type"] == "TOOL_CALL_RESULT"


def test_a_call_that_awaits_its_tool_shows_its_progress() -> None:
    progress = {"toolInvocationId": "inv_1", "name": "pick", "fraction": 0.5, "message": "half", "at": ""}
    events = render(started("inv_1"), parked("inv_1", "tool"), ("tool.progress", progress, None))
    assert [event["type"] for event in events[3:]] == ["ACTIVITY_SNAPSHOT", "ACTIVITY_SNAPSHOT"]
    assert events[-1]["messageId"] == "inv_1.progress"
    assert events[-1]["content"] | {"status": "parked", "fraction": 0.5, "message": "half"} == events[-1]["content"]
    assert events[-1]["content"]["expiresAt"] == "2027-01-01T00:00:00.000Z"


def test_a_call_that_could_not_be_made_is_shown_with_its_error() -> None:
    said = conversation(completed("inv_1", state="FAILED", errorMessage="There is no tool."), delta("B"), *END)
    assert said[0]["toolCalls"][0]["id"] == "inv_1"
    assert said[1]["content"] == "There is no tool."
    assert said[2]["id"] == "msg_1.2"


@pytest.mark.parametrize("happened", [[], [delta("half")], [delta("A"), started("inv_1"), completed("inv_1")]])
def test_a_cancelled_run_closes_what_is_open(happened: list[Given]) -> None:
    events = render(*happened, status("cancelled"))
    check(events)
    assert events[-1]["outcome"] == {"type": "cancelled"}


def test_a_failed_run_is_an_error() -> None:
    events = render(delta("half"), status("failed", errorCode="MODEL_ERROR", errorMessage="The model failed."))
    check(events)
    usage = events[-1].pop("usage")
    assert events[-1] == {"type": "RUN_ERROR", "message": "The model failed.", "code": "MODEL_ERROR"}
    assert usage[0]["totalTokens"] == 5


def test_a_rendering_keeps_nothing_that_grows() -> None:
    state = rendering()
    for turn in range(1, 50):
        render(
            *(delta("text") for _ in range(100)), started(f"inv_{turn}", turn), completed(f"inv_{turn}", turn), by=state
        )
    assert len(repr(vars(state))) < 600
