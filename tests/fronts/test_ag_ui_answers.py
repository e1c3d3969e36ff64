"""AG-UI's routes, where a request both answers and says something, and snapshots of long chats."""

from typing import Any

import pytest

from runs import services
from runs.fronts.ag_ui.views import AgUiViewSet
from runs.models import ClientRun, Run, Waitpoint
from tests import factories
from tests.driver import until
from tests.fronts.test_ag_ui import CHART, PICK, AgUi, cancelled, resolved, result, said, types
from tests.lifecycle.conftest import Bench
from tests.threads import side_by_side

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def thread(bench: Bench) -> AgUi:
    return AgUi(bench)


def texts(events: list[dict[str, Any]]) -> list[str]:
    return [event["delta"] for event in events if event["type"] == "TEXT_MESSAGE_CONTENT"]


HISTORY = [said(CHART), {"id": "a1", "role": "assistant", "content": "One"}]


@pytest.mark.parametrize("payload", [True, False])
def test_a_message_beside_an_answer_follows_the_run_that_goes_on(thread, payload):
    run = thread.run(said(CHART))
    body = resolved(run, payload) | {"runId": "next"}
    thread.send(*HISTORY, said("/say Also this", "u2"), **body)
    first, second = thread.runs()
    assert (first["id"], thread.bench.wait(second["id"])["answer"]) == (run["id"], "Also this")
    assert thread.bench.get(run["id"])["status"] == "completed"
    (call,) = thread.bench.get(run["id"])["toolInvocations"]
    assert call["status"] == ("COMPLETED" if payload else "REFUSED")
    # The same request again starts nothing, and shows what followed.
    again = thread.send(*HISTORY, said("/say Also this", "u2"), **body)
    assert (types(again)[:2], texts(again)) == (["RUN_STARTED", "MESSAGES_SNAPSHOT"], ["Also this"])
    assert len(thread.runs()) == 2


def test_one_stream_shows_what_the_answer_gave_and_then_the_message(thread):
    run = thread.run(said(CHART))
    thread.send(*HISTORY, said("/say Two", "u2"), **resolved(run, True))
    thread.bench.wait(thread.runs()[-1]["id"])
    # Under another id the answer comes too late, but both runs are shown.
    shown = thread.send(*HISTORY, said("/stream 3 1", "u3"), **resolved(run, True))
    assert types(shown)[:3] == ["RUN_STARTED", "MESSAGES_SNAPSHOT", "TOOL_CALL_RESULT"]
    assert types(shown).count("RUN_STARTED") == 1
    assert texts(shown)[0].startswith("It is ")


def test_a_message_beside_the_refusal_of_a_question_is_answered_at_once(thread):
    run = thread.run(said("/ask Which day?"))
    thread.send(said("/ask Which day?"), said("/say Never mind", "u2"), **cancelled(run))
    assert thread.bench.wait(thread.runs()[-1]["id"])["answer"] == "Never mind"
    assert thread.bench.get(run["id"])["status"] == "cancelled"


def test_a_message_waits_while_its_run_asks_once_more(thread, monkeypatch):
    """Its run follows in the stream of the last answer, although it has ended before that stream begins."""
    run = thread.run(said(f"{CHART}\n/ask Which day?\n/say On {{result}}"))
    thread.send(*HISTORY, said("/say Two", "u2"), **resolved(run, True))
    run = thread.bench.wait(run["id"], "waiting")
    assert run["pendingWaitpoint"]["kind"] == "CLARIFICATION"
    assert thread.runs()[-1]["status"] == "queued"
    respond = services.respond

    def respond_and_wait(*answer: Any) -> Waitpoint:
        answered = respond(*answer)
        assert [thread.bench.wait(each["id"])["status"] for each in thread.runs()] == ["completed"] * 2
        return answered

    monkeypatch.setattr(services, "respond", respond_and_wait)
    shown = thread.send(*HISTORY, said("/say Two", "u2"), **resolved(run, "Tuesday"))
    assert texts(shown) == ["On Tuesday", "Two"]


@pytest.mark.parametrize(
    ("message", "later"),
    [(said("/say Three", "u3"), ["Three"]), ({"id": "a1", "role": "assistant", "content": "One"}, [])],
)
def test_all_runs_in_line_are_shown_with_what_they_ask(thread, monkeypatch, message, later):
    run = thread.run(said(f"{CHART}\n/ask Which day?\n/say On {{result}}"))
    thread.send(*HISTORY, said("/ask Which hour?\n/say At {result}", "u2"), **resolved(run, True))
    run = thread.bench.wait(run["id"], "waiting")
    respond = services.respond

    def respond_and_wait(*answer: Any) -> Waitpoint:
        answered = respond(*answer)
        thread.bench.wait(thread.runs()[1]["id"], "waiting")
        return answered

    monkeypatch.setattr(services, "respond", respond_and_wait)
    shown = thread.send(message, **resolved(run, "Tuesday"))
    assert texts(shown) == ["On Tuesday"]
    (asked,) = shown[-1]["outcome"]["interrupts"]
    assert asked["message"] == "Which hour?"
    monkeypatch.undo()
    thread.send(message, **resolved(thread.bench.get(thread.runs()[1]["id"]), "Nine"))
    answers = [thread.bench.wait(each["id"])["answer"] for each in thread.runs()]
    assert answers[1:] == ["At Nine", *later]


def test_stop_ends_all_runs_that_a_stream_shows(thread):
    run = thread.run(said("/ask Which day?\n/stream 300 20"))
    thread.send(said("/say Two", "u2"), **resolved(run, "Tuesday"))
    stop = f"{thread.base}/copilotkit/agent/default/stop/{thread.key}"
    for stops in (True, False):
        assert thread.client.post(stop, {"runId": "r2"}, format="json").json() == {"stopped": stops}
        assert [thread.bench.wait(each["id"])["status"] for each in thread.runs()] == ["cancelled"] * 2


def test_a_snapshot_has_the_message_beside_an_answer_whose_run_has_just_ended(thread, monkeypatch):
    run = thread.run(said("/ask Which day?\n/wait 3\n/say On {result}"))
    body = resolved(run, "Tuesday") | {"runId": "next"}
    thread.send(said("/say Two", "u2"), **body)
    beside = AgUiViewSet.beside

    def late(*about: Any) -> Run | None:
        found = beside(*about)
        assert [thread.bench.wait(each["id"])["status"] for each in thread.runs()] == ["completed"] * 2
        return found

    monkeypatch.setattr(AgUiViewSet, "beside", late)
    shown = thread.send(said("/say Two", "u2"), **body)
    (snapshot,) = [event for event in shown if event["type"] == "MESSAGES_SNAPSHOT"]
    assert [message["content"] for message in snapshot["messages"] if message["role"] == "user"][-1] == "/say Two"
    assert texts(shown) == ["On Tuesday", "Two"]


def test_the_history_beside_an_answer_is_no_news(thread):
    run = thread.run(said(CHART))
    for message in (said("changed", "u1"), said(CHART, "unknown"), {"role": "user", "content": CHART}):
        thread.send(message, **resolved(run, True))
    assert [each["id"] for each in thread.runs()] == [run["id"]]


def test_sixteen_equal_answers_with_a_message_start_one_run(thread, user, settings):
    settings.RATE_LIMIT_RUN_STARTS = 0
    run = thread.run(said(CHART))
    clients = [AgUi(thread.bench, client=factories.session_client(user)) for _ in range(16)]
    sent = (*HISTORY, said("/say Two", "u2"))
    body = resolved(run, True) | {"runId": "next"}
    assert side_by_side(16, lambda number: clients[number].post(*sent, **body).status_code) == [200] * 16
    assert Run.objects.count() == 2
    assert thread.bench.wait(thread.runs()[-1]["id"])["answer"] == "Two"
    assert Waitpoint.objects.get().resolved_payload["approved"] is True
    assert ClientRun.objects.filter(run=thread.runs()[-1]["id"]).exists()


def test_a_result_beside_an_answer_is_not_sent_back(thread):
    """The client has it, under an id of its own."""
    run = thread.run(said(f"/call pick {{}}\n{CHART.splitlines()[1]}\n/say {{result}}"), tools=[PICK])
    picked, drawn = (call["id"] for call in run["toolInvocations"])
    sent = (said(CHART), result(picked, "red"))
    first = thread.send(*sent, runId="next", **resolved(run, True))
    assert picked not in [event.get("toolCallId") for event in first]
    thread.bench.wait(run["id"])
    again = thread.send(*sent, runId="next", **resolved(run, True))
    results = [event["toolCallId"] for event in again if event["type"] == "TOOL_CALL_RESULT"]
    assert sorted(results) == sorted([picked, drawn])  # after a snapshot without them


def test_an_outcome_that_a_client_may_have_comes_after_a_snapshot_without_it(thread):
    """A call beside the approval has ended meanwhile, and the client has loaded the thread again."""
    run = thread.run(said(f'/call long_job {{"seconds": 0.1}}\n{CHART.splitlines()[1]}\n/say {{result}}'))
    job, _ = (call["id"] for call in run["toolInvocations"])
    until(lambda: thread.bench.get(run["id"])["toolInvocations"][0]["status"] == "COMPLETED")
    results = [message["toolCallId"] for message in thread.connect()[1]["messages"] if message["role"] == "tool"]
    assert results == [job]
    shown = thread.send(said(CHART), **resolved(run, True))
    assert types(shown)[:3] == ["RUN_STARTED", "MESSAGES_SNAPSHOT", "TOOL_CALL_RESULT"]
    assert [message["role"] for message in shown[1]["messages"]] == ["user", "assistant"]
    assert shown[2]["toolCallId"] == job
    assert thread.bench.wait(run["id"])["status"] == "completed"


def test_a_snapshot_has_a_bound(thread, monkeypatch):
    for number in range(6):
        thread.run(said(f"/say {'x' * 1000}", f"u{number}"))
    monkeypatch.setattr("runs.fronts.ag_ui.events.SNAPSHOT_CHARS", 5000)
    shown = thread.connect()[1]["messages"]
    assert 2 < len(shown) < 6
    assert shown[-1]["content"] == "x" * 1000
    monkeypatch.setattr("runs.fronts.ag_ui.events.SNAPSHOT_CHARS", 5)
    assert len(thread.connect()[1]["messages"]) == 1


def test_a_snapshot_has_the_messages_that_wait_in_line(thread):
    thread.send(said("/stream 300 20"))
    thread.send(said("/say Two", "u2"))
    shown = thread.connect()[1]["messages"]
    assert [message["id"] for message in shown if message["role"] == "user"] == ["u1", "u2"]
    thread.bench.cancel(thread.runs()[0]["id"])
    thread.bench.wait(thread.runs()[-1]["id"])
