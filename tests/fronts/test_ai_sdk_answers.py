"""The AI SDK's routes, where more than one thing of an answer is open, or asked for twice."""

from collections.abc import Iterator
from itertools import takewhile
from typing import Any

import pytest
from django.core.management import call_command

from runs import catalogue, services
from runs.engine.engine import Heartbeat
from runs.events import StreamType
from runs.fronts import views
from runs.models import Run, Tool, Waitpoint
from runs.streams.reads import Event, existing
from tests import factories
from tests.driver import until
from tests.fronts.conftest import Frame, UseChat, said
from tests.fronts.test_ag_ui import AgUi
from tests.fronts.test_ai_sdk import CHART, LOCATE, approved, types
from tests.threads import side_by_side
from tests.tools.task_server import asks, form, task_server

pytestmark = pytest.mark.django_db(transaction=True)

JOB = '/call long_job {"seconds": 600}\n/call draw_chart {"title": "Sales", "series": [1]}\n/say {result}'
BOTH = '/call locate {}\n/call draw_chart {"title": "Sales", "series": [1]}\n/say {result}'
AGAIN = "regenerate-message"


def positions(frames: list[Frame]) -> list[tuple[int, ...]]:
    return [tuple(map(int, position.split("."))) for position, _ in frames]


def waiting(chat: UseChat, text: str, **body: Any) -> dict[str, Any]:
    """The answer whose run waits for an approval."""
    run = chat.run(said(text), **body)
    assert run["status"] == "waiting"
    return chat.messages()[-1]


def kinds(message: dict[str, Any]) -> list[str]:
    return [part.get("toolName", part["type"]) for part in message["parts"]]


@pytest.mark.parametrize("ends", ["before", "after"])
def test_an_approval_beside_a_parked_call_is_a_step_of_its_own(chat, ends):
    """The client sends no approval of a step in which an output is preliminary."""
    message = waiting(chat, JOB)
    assert kinds(message) == ["step-start", "long_job", "step-start", "draw_chart"]
    assert all(part["preliminary"] for _, part in chat.resume() if part_type(part) == "tool-output-available")
    opened = types(chat.resume())
    assert opened[-7:] == [
        *("finish-step", "start-step", "tool-input-available", "tool-approval-request"),
        *("finish-step", "finish", "[DONE]"),
    ]
    job = message["parts"][1]["toolCallId"]
    if ends == "before":
        call_command("callback", job, "--result", "done")
    chat.send(approved(message, True))
    if ends == "after":
        call_command("callback", job, "--result", "done")
    chat.bench.wait(chat.runs()[-1]["id"])
    continued = chat.send(approved(message, True))
    outputs = {part["toolCallId"]: part for _, part in continued if part_type(part) == "tool-output-available"}
    assert (outputs[job]["output"], len(outputs)) == ("done", 2)
    assert types(continued)[:3] == ["start", "tool-output-available", "tool-output-available"]
    assert kinds(chat.messages()[-1]) == [*kinds(message), "step-start", "text"]


def part_type(part: Any) -> str:
    return part if isinstance(part, str) else part["type"]


def test_the_output_of_the_client_beside_an_approval(chat):
    """The stream shows the outcome, which the client would otherwise send for ever, and what is still asked."""
    message = waiting(chat, BOTH, run=LOCATE)
    assert kinds(message) == ["step-start", "locate", "draw_chart"]
    located = message["parts"][1] | {"state": "output-available", "output": "here"}
    for _ in range(2):
        _, output, *rest = chat.send(message | {"parts": [located, message["parts"][-1]]})
        assert output[1]["providerExecuted"]
        assert types(rest) == ["tool-approval-request", "finish", "[DONE]"]
        assert [part["output"] for part in chat.messages()[-1]["parts"] if "output" in part] == ["here"]
    # A page that is loaded again gets the outcome too.
    assert types(chat.resume())[-5:] == [
        *("tool-output-available", "tool-approval-request", "finish-step", "finish", "[DONE]")
    ]
    chat.send(approved(message | {"parts": [located, message["parts"][-1]]}, True))
    assert chat.bench.wait(chat.runs()[-1]["id"])["status"] == "completed"


def test_an_output_beside_an_approval_hides_no_output_of_the_server(chat, monkeypatch):
    """Both in one request, as after a click on Approve first. The approved call may end before the output is taken."""
    text = '/call draw_chart {"title": "Sales", "series": [1]}\n/call locate {}\n/say {result}'
    message = waiting(chat, text, run=LOCATE)
    given = approved(message | {"parts": sorted(message["parts"], key=is_drawn)}, True)
    respond = services.respond

    def respond_and_wait(*answer: Any) -> Waitpoint:
        answered = respond(*answer)
        until(lambda: "COMPLETED" in statuses(chat))
        return answered

    monkeypatch.setattr(services, "respond", respond_and_wait)
    *_, asked = given["parts"]
    located = next(part for part in given["parts"] if part.get("toolName") == "locate")
    frames = chat.send(given | {"parts": [asked, located | {"state": "output-available", "output": "here"}]})
    outputs = [part["toolCallId"] for _, part in frames if part_type(part) == "tool-output-available"]
    assert sorted(outputs) == sorted([asked["toolCallId"], located["toolCallId"]])


def is_drawn(part: dict[str, Any]) -> bool:
    return part.get("toolName") == "draw_chart"


def statuses(chat: UseChat) -> list[str]:
    run = chat.bench.get(chat.runs()[-1]["id"])
    return [call["status"] for call in run["toolInvocations"]]


def test_a_client_repeats_its_earlier_answers(chat):
    message = waiting(chat, "/ask When?\n/say Then\n/call locate {}", run=LOCATE)
    asked = message["parts"][1] | {"state": "output-available", "output": "Tuesday"}
    chat.send(message | {"parts": [asked]})
    until(lambda: chat.runs()[-1]["awaiting"] == "client")
    message = chat.messages()[-1]
    *earlier, located = message["parts"]
    frames = chat.send(message | {"parts": [*earlier, located | {"state": "output-available", "output": "here"}]})
    assert (frames[1][1]["toolCallId"], frames[1][1]["output"]) == (located["toolCallId"], "here")


def test_a_call_that_asked_is_listed_where_the_stream_showed_it(chat):
    with task_server() as server:
        server.tool = lambda params: asks(who=form("Who?"))
        Tool.objects.create(name="research", display_name="Research", node_type="mcp", url=server.url, price=0)
        catalogue.forget()
        message = waiting(chat, '/call research {}\n/call calculate {"expression": "1+1"}')
        shown = [part["toolName"] for _, part in chat.resume() if part_type(part) == "tool-input-available"]
        assert shown == [part["toolName"] for part in message["parts"] if "toolName" in part]
        assert sorted(shown) == ["ask_user", "calculate", "research"]


def test_a_client_can_send_an_approval_beside_its_own_call_and_an_open_one_of_the_server(chat):
    """It sends nothing of a step in which a call of the server has no outcome: here that call asks the next question,
    once the approval is given.
    """
    with task_server() as server:
        server.tool = lambda params: asks(who=form("Who?"))
        Tool.objects.create(name="research", display_name="Research", node_type="mcp", url=server.url, price=0)
        catalogue.forget()
        script = f"/call locate {{}}\n{CHART.splitlines()[0]}\n/call research {{}}"
        message = waiting(chat, script, run=LOCATE)
        frames = [part for _, part in chat.resume()]
        shown = [part.get("toolName") for part in frames if part_type(part) in ("start-step", "tool-input-available")]
        assert shown == [None, "research", None, "locate", "draw_chart"]
        assert shown == [part.get("toolName") for part in message["parts"]]
        # The next question comes after what was answered.
        answered = message["parts"][-1] | {"state": "approval-responded"}
        chat.send(message | {"parts": [answered | {"approval": answered["approval"] | {"approved": False}}]})
        message = until(lambda: (found := chat.messages()[-1])["parts"][-1]["toolName"] == "ask_user" and found)
        shown = [part["toolName"] for _, part in chat.resume() if part_type(part) == "tool-input-available"]
        assert shown == [part["toolName"] for part in message["parts"] if "toolName" in part]


def test_a_client_gets_the_outcome_of_what_another_client_approved(chat):
    message = waiting(chat, BOTH, run=LOCATE)
    respond(chat)
    run = chat.runs()[-1]["id"]
    until(lambda: chat.bench.get(run)["toolInvocations"][1]["status"] == "COMPLETED")
    located = message["parts"][1] | {"state": "output-available", "output": "here"}
    frames = chat.send(message | {"parts": [located]})
    ended = [part["toolCallId"] for _, part in frames if part_type(part) == "tool-output-available"]
    assert ended == [call["id"] for call in chat.bench.get(run)["toolInvocations"]][::-1]


def respond(chat: UseChat) -> None:
    """Another client approves what is asked."""
    question = chat.runs()[-1]["pendingWaitpoint"]["id"]
    answer = {"kind": "CREDIT_APPROVAL", "approved": True}
    assert chat.client.post(f"/api/v1/waitpoints/{question}/respond", answer, format="json").status_code == 200


def outputs(frames: list[Frame]) -> list[str]:
    return [part["toolCallId"] for _, part in frames if part_type(part) == "tool-output-available"]


def test_a_client_gets_what_is_asked_after_what_another_client_approved(chat):
    """It shows the first approval alone, so that the second one is of a call that it does not know."""
    message = waiting(chat, f"/call locate {{}}\n{JOB}", run=LOCATE | {"creditApprovalThreshold": 1})
    assert kinds(message) == ["step-start", "locate", "long_job"]
    respond(chat)
    asked = until(lambda: (found := chat.messages()[-1]["parts"])[-1]["toolName"] == "draw_chart" and found[-1])
    *_, located, job = message["parts"]
    frames = chat.send(message | {"parts": [located | {"state": "output-available", "output": "here"}, job]})
    shown = [part["toolCallId"] for _, part in frames if part_type(part) == "tool-input-available"]
    assert shown == [asked["toolCallId"]]
    assert set(outputs(frames)) == {located["toolCallId"], job["toolCallId"]}
    assert types(frames)[-3:] == ["tool-approval-request", "finish", "[DONE]"]


def test_a_client_gets_the_outcome_of_a_call_that_has_waited_for_credits(chat):
    options = {"maxCredits": 5, "onCreditsExhausted": "wait", "creditApprovalThreshold": 100}
    message = waiting(chat, BOTH, run=LOCATE | options)
    assert message["parts"][-1]["state"] == "approval-requested"
    question = chat.runs()[-1]["pendingWaitpoint"]["id"]
    answer = {"kind": "CREDIT_APPROVAL", "approved": True, "maxCredits": 50}
    assert chat.client.post(f"/api/v1/waitpoints/{question}/respond", answer, format="json").status_code == 200
    until(lambda: statuses(chat)[1] == "COMPLETED")
    *_, located, drawn = message["parts"]
    frames = chat.send(message | {"parts": [located | {"state": "output-available", "output": "here"}, drawn]})
    assert outputs(frames) == [drawn["toolCallId"], located["toolCallId"]]


@pytest.mark.parametrize("text", ["/say Text\n", ""])
def test_an_approval_after_a_turn_without_calls_is_listed(chat, text):
    """The output did not fit, and the budget does not reach for another try."""
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    script = f'/usage 1000 1000\n{text}/call submit_output {{"n": "x"}}\n/call submit_output {{"n": 1}}'
    message = waiting(chat, script, run={"outputSchema": schema, "onCreditsExhausted": "wait", "maxCredits": 2.3})
    assert kinds(message) == ["step-start", *(["text"] if text else []), "model"]
    assert message["parts"][-1]["state"] == "approval-requested"
    shown = [
        part_type(part).partition("-")[0]
        for _, part in chat.resume()
        if part_type(part).endswith(("start", "available"))
    ]
    assert shown == ["start", *(["text"] if text else []), "tool"]


def test_a_stream_that_is_behind_does_not_stop_for_the_client(chat, monkeypatch):
    """What has happened meanwhile would never come: the client goes on after its own answers."""
    chat.send(said(BOTH), run=LOCATE | {"maxCredits": 1})
    run = chat.runs()[-1]["id"]
    until(lambda: [call["status"] for call in chat.bench.get(run)["toolInvocations"]] == ["DISPATCHING", "FAILED"])
    assert types(chat.resume())[-3:] == ["finish-step", "finish", "[DONE]"]

    def behind(*position: Any) -> Iterator[Event]:
        return takewhile(lambda event: event.type != StreamType.TOOL_COMPLETED, existing(*position))

    monkeypatch.setattr(views, "existing", behind)
    assert types(chat.resume())[-1] == "tool-input-available"


def test_all_outcomes_of_the_client_are_the_servers(chat):
    """Also if the run ends with them: else the client would send them for ever."""
    chat.send(said("/call locate {}\n/call locate {}\n/wait 60"), run=LOCATE)
    until(lambda: chat.runs()[-1]["awaiting"] == "client")
    message = chat.messages()[-1]
    outputs = [part | {"state": "output-available", "output": 1} for part in message["parts"][1:]]
    chat.send(message | {"parts": outputs})
    chat.client.post(f"{chat.api}/{chat.key}/stop")
    chat.bench.wait(chat.runs()[-1]["id"])
    frames = chat.send(message | {"parts": outputs})
    shown = [part["providerExecuted"] for _, part in frames if part_type(part) == "tool-output-available"]
    assert shown == [True, True]
    assert types(frames)[-3:] == ["abort", "finish", "[DONE]"]


def test_a_client_continues_after_any_frame_of_a_stream_that_stops_for_it(chat):
    chat.send(said('/say One\n/call locate {}\n/call long_job {"seconds": 0.1}'), run=LOCATE)
    frames = until(lambda: (found := chat.resume()) and found[-1][1] == "[DONE]" and found)
    assert types(frames)[-4:] == ["tool-output-available", "finish-step", "finish", "[DONE]"]
    assert positions(frames) == sorted(set(positions(frames)))
    for number, (position, _) in enumerate(frames, 1):
        assert chat.resume(f"stream?after={position}") == frames[number:]


@pytest.mark.parametrize("loaded", [False, True])
def test_a_default_regenerate_replaces_each_answer(chat, loaded):
    """It names the user's message, which the client may know by the id that the chat had when it was loaded."""
    first = chat.run(said("/say Hello"))
    asked = said("/say Hello", first["userMessageId"] if loaded else "u1")
    runs = [first, *(chat.run(asked, trigger=AGAIN) for _ in range(3))]
    assert len({run["id"] for run in runs}) == 4
    assert [run["id"] for run in chat.runs()] == [runs[-1]["id"]]
    assert len(chat.messages()) == 2


def test_regenerate_twice_shows_the_answer_that_is_being_written(chat, user, settings):
    settings.RATE_LIMIT_RUN_STARTS = 0
    message = said("/stream 200 20")
    chat.send(message)
    # The answer that is left is stopped.
    working = chat.runs()[-1]["id"]
    chat.send(message, trigger=AGAIN)
    assert chat.bench.wait(working)["status"] == "cancelled"
    clients = [UseChat(chat.bench, client=factories.session_client(user)) for _ in range(8)]
    answers = side_by_side(8, lambda number: clients[number].post(message, trigger=AGAIN).status_code)
    assert answers == [200] * 8
    assert Run.objects.count() == 2
    # Unless the client wants another one.
    chat.send(message, trigger=AGAIN, run={"onActiveRun": "cancel"})
    assert Run.objects.count() == 3
    chat.bench.cancel(chat.runs()[-1]["id"])
    chat.bench.wait(chat.runs()[-1]["id"])


def test_stop_ends_the_answer_that_takes_the_place_of_one_that_ends(chat, monkeypatch):
    monkeypatch.setattr(Heartbeat, "_look_for_cancels", lambda self: None)
    chat.send(said("/stream 1000 20"))
    until(lambda: chat.runs()[-1]["status"] == "running")
    for _ in range(2):
        chat.send(said("/stream 1000 20"), trigger=AGAIN, run={"onActiveRun": "cancel"})
    assert chat.client.post(f"{chat.api}/{chat.key}/stop").json() == {"success": True}
    states = list(Run.objects.order_by("pk").values_list("status", flat=True))
    assert states == ["running", "cancelled", "cancelled"]


def test_a_page_that_is_loaded_gets_the_answer_that_takes_the_place_of_one_that_ends(chat, monkeypatch):
    monkeypatch.setattr(Heartbeat, "_look_for_cancels", lambda self: None)
    chat.send(said("/stream 1000 20"))
    until(lambda: chat.runs()[-1]["status"] == "running")
    chat.send(said("/say Hello"), run={"onActiveRun": "cancel"})
    (run,) = chat.runs()
    assert chat.resume() == []  # it has not begun
    started, snapshot = AgUi(chat.bench, chat.key).connect()
    assert started["metadata"]["runId"] == run["id"]
    assert [message["content"] for message in snapshot["messages"]] == ["/say Hello"]


def test_regenerate_while_the_user_is_asked_begins_again(chat):
    first, second = chat.run(said(CHART)), chat.run(said(CHART), trigger=AGAIN)
    third = chat.run(said(CHART), trigger=AGAIN)
    states = [chat.bench.get(run["id"])["status"] for run in (first, second, third)]
    assert states == ["cancelled", "cancelled", "waiting"]


def test_regenerate_after_a_message_that_did_not_arrive_sends_it(chat, settings):
    settings.STREAMS_PER_USER = 0
    assert chat.post(said("/say Hello")).status_code == 429
    settings.STREAMS_PER_USER = 50
    assert chat.run(said("/say Hello"), trigger=AGAIN)["answer"] == "Hello"


def test_an_edit_ends_the_answer_to_the_old_text(chat):
    chat.run(said("/say One"))
    chat.send(said("/stream 200 20", "u2"))
    later = chat.runs()[-1]["id"]
    assert chat.run(said("/say Hello"))["answer"] == "Hello"
    assert chat.bench.get(later)["status"] == "cancelled"


def test_an_edit_of_a_message_that_waits_in_line_keeps_its_place(chat):
    chat.send(said("/stream 40 20"))
    chat.send(said("/say Two", "u2"))
    chat.send(said("/say Later", "u3"))
    working, *replaced = (run["id"] for run in chat.runs())
    assert chat.run(said("/say Three", "u2"))["answer"] == "Three"
    # Nobody would see the answer to the last message, which the edit replaces too.
    assert [chat.bench.get(run)["status"] for run in (working, *replaced)] == ["completed", "cancelled", "cancelled"]
