"""Each state and errorCode of a run, reached through the API with a real engine."""

from __future__ import annotations

import pytest
from django.db import IntegrityError
from django.db.models import F

from config.api import broker
from credits import ledger
from credits.models import LedgerEntry
from runs import catalogue, sweeps, transitions
from runs.models import AgentModel, Run, RunEvent, Tool, ToolInvocation, Waitpoint, Worker
from tests import factories
from tests.driver import Driver, InProcess, until
from tests.runs.conftest import seed_catalogue, vanish

pytestmark = pytest.mark.django_db(transaction=True)


def joined(events) -> str:
    """The message as a client of the stream has it."""
    text = ""
    for kind, data in events:
        if kind == "message.reset":
            text = ""
        elif kind == "message.delta":
            text += data["text"]
    return text


def test_plain_answer_completes_and_is_charged(bench, events):
    started = bench.start("Hello there")
    assert started["status"] == "queued"
    assert started["lastStreamIndex"] == 1
    assert started["assistantMessageId"] is None
    run = bench.wait(started["id"])
    assert run["status"] == "completed"
    assert run["resolvedModel"] == "demo"
    assert run["requestedModel"] is None
    assert run["startedAt"] <= run["finishedAt"]
    assert run["pendingWaitpoint"] is None
    assert run["totalCreditsUsed"] > 0
    assert bench.content(run) == joined(events(run["id"])) != ""
    assert [data["status"] for kind, data in events(run["id"]) if kind == "run.status"] == [
        "queued",
        "running",
        "completed",
    ]
    assert bench.client.get(f"/api/v1/chats/{run['chatId']}").json()["activeRunId"] is None


def test_tool_call_is_made_charged_and_told_to_the_model(bench, events):
    run = bench.finish('/call calculate {"expression": "6*7"}\n/say The result is {result}.')
    assert run["status"] == "completed"
    assert bench.content(run) == "The result is 42."
    (call,) = run["toolInvocations"]
    assert call["status"] == "COMPLETED"
    assert call["agentRunId"] == run["id"]
    assert (call["turnIndex"], call["callIndex"]) == (1, 1)
    assert call["creditEstimate"] == call["creditUsed"] == 0.1
    assert call["input"] == {"expression": "6*7"}
    assert call["nodeType"] == "builtin"
    assert call["durationMs"] >= 0
    assert call["errorCode"] is None
    kinds = [kind for kind, _ in events(run["id"])]
    assert kinds.index("tool.started") < kinds.index("tool.completed")
    assert bench.credits()["held"] == "0"


def test_usage_is_charged_exactly(bench):
    run = bench.finish("/usage 1000 2000\n/say ok")
    assert run["totalCreditsUsed"] == 3.5
    assert bench.credits() == {"balance": "96.5", "held": "0", "available": "96.5"}


def test_calls_of_one_turn_run_side_by_side(bench):
    run = bench.finish('/call calculate {"expression": "1+1"}\n/call calculate {"expression": "2+2"}\n/say {result}')
    calls = run["toolInvocations"]
    assert [(call["turnIndex"], call["callIndex"], call["status"]) for call in calls] == [
        (1, 1, "COMPLETED"),
        (1, 2, "COMPLETED"),
    ]
    assert bench.content(run) == "4"


def test_approval_is_asked_held_and_charged(bench, events):
    started = bench.start('/call draw_chart {"title": "T", "series": [1, 2]}\n/say done')
    run = bench.wait(started["id"], "waiting")
    waitpoint = run["pendingWaitpoint"]
    assert waitpoint["kind"] == "CREDIT_APPROVAL"
    assert waitpoint["status"] == "PENDING"
    assert waitpoint["requestPayload"] == {"toolName": "draw_chart", "estimatedCredits": 12, "threshold": 10}
    assert waitpoint["resolvedPayload"] is None
    assert bench.credits()["held"] == "0"
    assert run["toolInvocations"][0]["status"] == "PENDING"
    assert Run.objects.get().worker_id is None

    answered = bench.respond(run, kind="CREDIT_APPROVAL", approved=True)
    assert answered["status"] == "COMPLETED"
    assert answered["resolvedPayload"]["approved"] is True
    assert answered["resolvedPayload"]["respondedAt"] == answered["resolvedAt"]
    run = bench.wait(run["id"])
    assert run["status"] == "completed"
    assert run["toolInvocations"][0]["creditUsed"] == 12
    assert run["toolInvocations"][0]["resultUrls"]
    assert bench.credits()["held"] == "0"
    statuses = [data["status"] for kind, data in events(run["id"]) if kind == "run.status"]
    assert statuses == ["queued", "running", "waiting", "queued", "running", "completed"]


def test_refusal_costs_nothing_and_the_run_goes_on(bench):
    run = bench.wait(
        bench.start('/usage 0 0\n/call draw_chart {"title": "T", "series": [1]}\n/usage 0 0\n/say on')["id"], "waiting"
    )
    bench.respond(run, kind="CREDIT_APPROVAL", approved=False)
    run = bench.wait(run["id"])
    assert run["status"] == "completed"
    assert run["totalCreditsUsed"] == 0
    (call,) = run["toolInvocations"]
    assert (call["status"], call["errorCode"], call["creditUsed"]) == ("REFUSED", "APPROVAL_REFUSED", 0)
    assert bench.credits()["balance"] == "100"


def test_threshold_of_the_run_decides(bench):
    run = bench.finish('/call draw_chart {"title": "T", "series": [1]}', creditApprovalThreshold=12)
    assert run["status"] == "completed"
    waiting = bench.wait(bench.start('/call calculate {"expression": "1"}', creditApprovalThreshold=0)["id"], "waiting")
    assert waiting["pendingWaitpoint"]["requestPayload"]["threshold"] == 0


def test_clarification(bench):
    run = bench.wait(bench.start("/ask Which colour?\n/say You chose {result}.")["id"], "waiting")
    waitpoint = run["pendingWaitpoint"]
    assert waitpoint["kind"] == "CLARIFICATION"
    assert waitpoint["requestPayload"] == {"question": "Which colour?"}
    wrong = bench.client.post(
        f"/api/v1/waitpoints/{waitpoint['id']}/respond", {"kind": "CREDIT_APPROVAL", "approved": True}, format="json"
    )
    assert wrong.status_code == 400
    answered = bench.respond(run, kind="CLARIFICATION", answer="blue")
    assert answered["resolvedPayload"]["answer"] == "blue"
    again = bench.respond(run, kind="CLARIFICATION", answer="red")
    assert again == answered
    assert bench.respond(run, kind="CREDIT_APPROVAL", approved=True) == answered
    run = bench.wait(run["id"])
    assert bench.content(run) == "You chose blue."
    assert run["toolInvocations"][0]["status"] == "COMPLETED"


def test_two_questions_in_one_turn_are_asked_one_by_one(bench):
    message = "\n".join(
        ['/call draw_chart {"title": "T", "series": [1]}'] * 2 + ['/call calculate {"expression": "2"}']
    )
    run = bench.wait(bench.start(message)["id"], "waiting")
    assert [call["status"] for call in run["toolInvocations"]] == ["PENDING", "PENDING", "COMPLETED"]
    first = bench.respond(run, kind="CREDIT_APPROVAL", approved=True)
    run = bench.wait(run["id"], "waiting")
    assert run["pendingWaitpoint"]["id"] != first["id"]
    bench.respond(run, kind="CREDIT_APPROVAL", approved=False)
    run = bench.wait(run["id"])
    assert [call["status"] for call in run["toolInvocations"]] == ["COMPLETED", "REFUSED", "COMPLETED"]


def test_waitpoint_expires(bench, settings):
    settings.WAITPOINT_EXPIRY_SECONDS = 0.2
    run = bench.wait(bench.start("/ask Anyone?")["id"], "waiting")
    until(lambda: sweeps.expire_waitpoints() or Run.objects.get().status == "failed")
    run = bench.get(run["id"])
    assert (run["status"], run["errorCode"]) == ("failed", "WAITPOINT_EXPIRED")
    waitpoint = bench.client.get(f"/api/v1/waitpoints/{Waitpoint.objects.get().pk}").json()
    assert waitpoint["status"] == "EXPIRED"
    assert waitpoint["resolvedAt"] is not None
    late = bench.client.post(
        f"/api/v1/waitpoints/{waitpoint['id']}/respond", {"kind": "CLARIFICATION", "answer": "me"}, format="json"
    )
    assert (late.status_code, late.json()) == (200, waitpoint)
    assert run["toolInvocations"][0]["status"] == "CANCELLED"


def test_answer_after_expiry_before_the_sweep_expires_it(bench, settings):
    settings.WAITPOINT_EXPIRY_SECONDS = 0
    run = bench.wait(bench.start("/ask Anyone?")["id"], "waiting", "failed")
    late = bench.client.post(
        f"/api/v1/waitpoints/{Waitpoint.objects.get().pk}/respond",
        {"kind": "CLARIFICATION", "answer": "me"},
        format="json",
    )
    assert (late.status_code, late.json()["status"]) == (200, "EXPIRED")
    assert bench.get(run["id"])["errorCode"] == "WAITPOINT_EXPIRED"


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("/fail the model is out", "MODEL_ERROR"),
        ("/wait 5", "MODEL_TIMEOUT"),
    ],
)
def test_model_errors(bench, settings, message, code):
    settings.MODEL_TIMEOUT_SECONDS = 0.3
    run = bench.finish(message)
    assert (run["status"], run["errorCode"]) == ("failed", code)
    assert run["errorMessage"]
    assert run["finishedAt"]


def test_text_before_a_failure_is_kept(bench, events):
    run = bench.finish("/say half of it\n/fail out")
    assert run["status"] == "failed"
    assert bench.content(run) == joined(events(run["id"])) == "half of it"


def test_a_write_that_the_database_refuses_each_time_ends_the_run(bench, monkeypatch):
    def refuse(*args, **kwargs):
        raise IntegrityError("never")

    monkeypatch.setattr(transitions, "record_turn", refuse)
    run = bench.finish("Hello")
    assert (run["status"], run["errorCode"]) == ("failed", "INTERNAL_ERROR")


def test_turn_limit(bench, settings):
    settings.RUN_TURN_LIMIT = 2
    run = bench.finish('/call calculate {"expression": "1"}\n/say a\n/call calculate {"expression": "1"}\n/say b')
    assert (run["status"], run["errorCode"]) == ("failed", "TURN_LIMIT_EXCEEDED")


def test_run_timeout(bench, settings):
    settings.RUN_TIMEOUT_SECONDS = 0.5
    run = bench.finish("/say begun\n/wait 20")
    assert (run["status"], run["errorCode"]) == ("failed", "RUN_TIMEOUT")
    assert bench.content(run) == "begun"


def test_credits_run_out_between_turns(bench):
    run = bench.finish('/usage 0 100000\n/call calculate {"expression": "1"}\n/say never')
    assert (run["status"], run["errorCode"]) == ("failed", "INSUFFICIENT_CREDITS")
    (call,) = run["toolInvocations"]
    assert (call["status"], call["errorCode"]) == ("FAILED", "INSUFFICIENT_CREDITS")
    refused = bench.client.post(f"/api/v1/chats/{bench.chat()}/runs", {"message": "x"}, format="json")
    assert refused.status_code == 402
    assert refused.json()["error"]["code"] == "INSUFFICIENT_CREDITS"
    assert refused.json()["error"]["details"] == {"available": "-50"}


def test_budget_stops_calls_and_turns(bench):
    run = bench.finish(
        '/usage 0 0\n/call calculate {"expression": "1"}\n/usage 0 0\n/call web_fetch {"url": "http://127.0.0.1:9/"}'
        "\n/usage 1000 0\n/say still here",
        maxCredits=0.5,
    )
    assert [call["errorCode"] for call in run["toolInvocations"]] == [None, "BUDGET_EXCEEDED"]
    assert run["status"] == "completed"
    run = bench.finish('/usage 1000 0\n/call calculate {"expression": "1"}\n/say no', maxCredits=0.5)
    assert (run["status"], run["errorCode"]) == ("failed", "BUDGET_EXCEEDED")


def test_budget_holds_for_calls_side_by_side(bench):
    """Calls of one turn are all at work before any of them is charged."""
    run = bench.finish("/usage 0 0\n" + '/call calculate {"expression": "1"}\n' * 5 + "/say done", maxCredits=0.35)
    codes = [call["errorCode"] for call in run["toolInvocations"]]
    assert (codes.count(None), codes.count("BUDGET_EXCEEDED")) == (3, 2)
    held = LedgerEntry.objects.filter(run_id=run["id"], type="HOLD").values_list("amount", flat=True)
    assert list(held) == [100_000] * 3


def test_prices_are_those_of_their_time(bench):
    script = '/call calculate {"expression": "1"}\n/usage 1000 1000\n/say done'
    first = bench.finish(script)
    before = list(LedgerEntry.objects.filter(run_id=first["id"]).order_by("pk").values())
    Tool.objects.filter(name="calculate").update(price=700_000)
    AgentModel.objects.filter(name="demo").update(price_in=F("price_in") * 3, price_out=F("price_out") * 3)
    catalogue.forget()
    second = bench.finish(script)
    assert list(LedgerEntry.objects.filter(run_id=first["id"]).order_by("pk").values()) == before
    assert bench.get(first["id"])["totalCreditsUsed"] == first["totalCreditsUsed"]

    def prices(run, type):
        return [row.price for row in LedgerEntry.objects.filter(run_id=run["id"], type=type).order_by("pk")]

    for type in ("HOLD", "CAPTURE"):
        assert (prices(first, type), prices(second, type)) == ([{"perCall": 100_000}], [{"perCall": 700_000}])
    for old, new in zip(prices(first, "USAGE"), prices(second, "USAGE"), strict=True):
        assert (old["in"], old["out"]) == (500_000, 1_500_000)
        assert (new["in"], new["out"]) == (1_500_000, 4_500_000)


def test_budget_is_checked_before_anybody_is_asked(bench):
    run = bench.finish('/call draw_chart {"title": "T", "series": [1]}\n/say on', maxCredits=11)
    assert run["status"] == "completed"
    assert run["toolInvocations"][0]["errorCode"] == "BUDGET_EXCEEDED"


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ('/call nothing_such {"a": 1}', "UNKNOWN_TOOL"),
        ('/call calculate {"expr": 1}', "INVALID_INPUT"),
        ("/call calculate {oops", "INVALID_INPUT"),
        ('/call calculate {"expression": "1/0"}', "TOOL_ERROR"),
    ],
)
def test_failed_tool_does_not_fail_the_run(bench, call, code):
    run = bench.finish(f"{call}\n/say went on")
    assert run["status"] == "completed"
    (invocation,) = run["toolInvocations"]
    assert (invocation["status"], invocation["errorCode"]) == ("FAILED", code)
    assert invocation["creditUsed"] == 0
    assert bench.credits()["held"] == "0"


def test_tools_may_be_narrowed(bench):
    run = bench.finish('/call calculate {"expression": "1"}', tools=["ask_user"])
    assert run["toolInvocations"][0]["errorCode"] == "UNKNOWN_TOOL"


def test_cancel_a_queued_run(session, nudges):
    seed_catalogue()
    chat = session.post("/api/v1/chats", {}, format="json").json()["id"]
    run = session.post(f"/api/v1/chats/{chat}/runs", {"message": "x"}, format="json").json()
    cancelled = session.post(f"/api/v1/runs/{run['id']}/cancel").json()
    assert cancelled["status"] == "cancelled"
    assert cancelled["cancelRequestedAt"] is not None
    assert cancelled["finishedAt"] is not None
    assert session.post(f"/api/v1/runs/{run['id']}/cancel").json() == cancelled


def test_cancel_a_waiting_run(bench):
    run = bench.wait(bench.start("/ask Hm?")["id"], "waiting")
    cancelled = bench.client.post(f"/api/v1/runs/{run['id']}/cancel").json()
    assert cancelled["status"] == "cancelled"
    assert cancelled["pendingWaitpoint"] is None
    assert Waitpoint.objects.get().status == "EXPIRED"
    assert cancelled["toolInvocations"][0]["status"] == "CANCELLED"


def test_cancel_a_streaming_run_keeps_its_text(bench, events):
    run = bench.start("/stream 1000 20")
    bench.wait(run["id"], "running")
    until(lambda: any(kind == "message.delta" for kind, _ in events(run["id"])))
    asked = bench.client.post(f"/api/v1/runs/{run['id']}/cancel").json()
    assert asked["cancelRequestedAt"] is not None
    run = bench.wait(run["id"])
    assert run["status"] == "cancelled"
    assert bench.content(run) == joined(events(run["id"])) != ""


def test_reject_and_enqueue_in_order(bench):
    chat = bench.chat()
    first = bench.start("/ask Hm?", chat)
    refused = bench.client.post(f"/api/v1/chats/{chat}/runs", {"message": "x"}, format="json")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "RUN_IN_PROGRESS")
    second = bench.start("/say two", chat, onActiveRun="enqueue")
    third = bench.start("/say three", chat, onActiveRun="enqueue")
    first = bench.wait(first["id"], "waiting")
    assert bench.get(second["id"])["status"] == "queued"
    bench.respond(first, kind="CLARIFICATION", answer="go")
    ends = [bench.wait(run["id"])["finishedAt"] for run in (first, second, third)]
    assert ends == sorted(ends)
    roles = [m["role"] for m in bench.client.get(f"/api/v1/chats/{chat}/messages").json()["items"]]
    assert sorted(roles) == ["assistant"] * 3 + ["user"] * 3


def test_deleting_a_chat_ends_its_runs(bench):
    chat = bench.chat()
    first = bench.start("/ask Hm?", chat)
    second = bench.start("/say two", chat, onActiveRun="enqueue")
    bench.wait(first["id"], "waiting")
    assert bench.client.delete(f"/api/v1/chats/{chat}").status_code == 204
    assert set(Run.objects.values_list("status", flat=True)) == {"cancelled"}
    for path in (
        f"runs/{first['id']}",
        f"runs/{second['id']}",
        f"chats/{chat}",
        f"waitpoints/{Waitpoint.objects.get().pk}",
    ):
        assert bench.client.get(f"/api/v1/{path}").status_code == 404


def test_lost_worker_is_replaced_and_nothing_is_done_twice(bench, engines, events, monkeypatch):
    """The lease of a worker that vanished expires; another goes on from what is recorded."""
    run = bench.start('/call calculate {"expression": "6*7"}\n/stream 60 50\n/say {result}')
    until(lambda: any(kind == "message.delta" for kind, _ in events(run["id"])))
    vanish(bench.engine)
    second = engines()
    assert second.worker_id != bench.engine.worker_id
    run = bench.wait(run["id"], timeout=30)
    assert run["status"] == "completed"
    assert ToolInvocation.objects.count() == 1
    assert "message.reset" in [kind for kind, _ in events(run["id"])]
    assert bench.content(run) == joined(events(run["id"]))
    assert Run.objects.get().lease_losses == 1
    assert [data["status"] for kind, data in events(run["id"]) if kind == "run.status"] == [
        "queued",
        "running",
        "completed",
    ]


def test_run_that_loses_its_worker_too_often_fails(bench, settings):
    settings.RUN_LEASE_LOSSES_MAX = 1
    run = bench.start("/wait 30")
    bench.wait(run["id"], "running")
    vanish(bench.engine)

    def swept():
        sweeps.reap_workers()
        return Run.objects.get().status == "failed"

    until(swept)
    assert bench.get(run["id"])["errorCode"] == "WORKER_LOST"


def test_shutdown_hands_runs_over_without_a_loss(bench, engines, events):
    run = bench.start("/stream 40 50\n/say end")
    bench.wait(run["id"], "running")
    first, second = bench.engine, engines()
    first.stop(0)
    run = bench.wait(run["id"])
    assert run["status"] == "completed"
    assert Run.objects.get().lease_losses == 0
    assert bench.content(run) == joined(events(run["id"]))
    assert not Worker.objects.filter(pk=first.worker_id).exists()
    assert second.worker_id


def test_model_that_is_gone(bench, session):
    AgentModel.objects.create(
        name="gone", display_name="Gone", provider="demo", provider_model="demo", price_in=0, price_out=0, enabled=False
    )
    refused = session.post(f"/api/v1/chats/{bench.chat()}/runs", {"message": "x", "model": "gone"}, format="json")
    assert refused.status_code == 400
    assert "model" in refused.json()["error"]["details"]["fields"]


def test_others_see_nothing(bench):
    run = bench.wait(bench.start("/ask Hm?")["id"], "waiting")
    stranger = factories.UserFactory()
    for client, surface in (
        (factories.session_client(stranger), "/api/v1"),
        (factories.public_client(stranger), "/api/public/v1"),
    ):
        waitpoint = f"{surface}/waitpoints/{run['pendingWaitpoint']['id']}"
        answers = [
            client.get(f"{surface}/runs/{run['id']}"),
            client.post(f"{surface}/runs/{run['id']}/cancel"),
            client.get(f"{surface}/chats/{run['chatId']}"),
            client.get(f"{surface}/chats/{run['chatId']}/runs"),
            client.get(f"{surface}/chats/{run['chatId']}/messages"),
            client.post(f"{surface}/chats/{run['chatId']}/runs", {"message": "x"}, format="json"),
            client.delete(f"{surface}/chats/{run['chatId']}"),
            client.patch(f"{surface}/chats/{run['chatId']}", {"title": "mine"}, format="json"),
            client.get(waitpoint),
            client.post(f"{waitpoint}/respond", {"kind": "CLARIFICATION", "answer": "x"}, format="json"),
        ]
        assert [answer.status_code for answer in answers] == [404] * len(answers)
    assert bench.get(run["id"])["status"] == "waiting"


def test_ledger_adds_up(bench, user):
    for _ in range(3):
        bench.finish('/call calculate {"expression": "1"}\n/call calculate {"expression": "1/0"}\n/say x')
    account = ledger.account_for(user.pk)
    assert account.held == 0
    spent = sum(ledger.run_spent(run.pk) for run in Run.objects.all())
    assert account.balance == 100_000_000 - spent


def test_one_user_has_so_many_running_and_the_rest_in_order(bench, settings, user):
    settings.RUN_USER_LIMIT = 3

    def running() -> set[str]:
        return set(Run.objects.filter(user=user, status="running").values_list("pk", flat=True))

    runs = [bench.start("/wait 600")["id"] for _ in range(3)]
    until(lambda: running() == set(runs))
    runs += [bench.start("/wait 600")["id"] for _ in range(4)]
    until(lambda: Run.objects.filter(pk__in=runs, throttled=True).count() == 4)
    others = Driver(InProcess(factories.session_client(factories.UserFactory())))
    assert others.finish("Hello")["status"] == "completed"
    for at in range(4):
        assert running() == set(runs[at : at + 3])
        bench.cancel(runs[at])
        until(lambda at=at: running() == set(runs[at + 1 : at + 4]))


def test_runs_that_waited_for_room_go_once_there_is_no_limit(bench, settings, monkeypatch):
    settings.RUN_USER_LIMIT = 1
    running = bench.start("/wait 600")["id"]
    bench.wait(running, "running")
    waiting = [bench.start("Hello")["id"] for _ in range(2)]
    until(lambda: Run.objects.filter(pk__in=waiting, throttled=True).count() == 2)
    settings.RUN_USER_LIMIT = 0  # as after a restart with another setting
    monkeypatch.setattr(sweeps, "nudge", broker.nudge)
    sweeps.sweep()
    assert [bench.wait(run_id)["status"] for run_id in waiting] == ["completed", "completed"]


def test_text_written_while_its_worker_leaves_does_not_keep_a_run(bench, monkeypatch):
    run_id = bench.start("/stream 400 50")["id"]
    bench.wait(run_id, "running")
    hand_over, refused = transitions.hand_over, []

    def overtaken(run):
        if not refused:
            refused.append(run.id)
            # As the flusher does, between the reading of the run and its hand-over.
            index = run.last_stream_index + 1
            Run.objects.filter(pk=run.id).update(last_stream_index=index)
            RunEvent.objects.create(run_id=run.id, index=index, type="message.delta", data='{"text":""}')
        hand_over(run)

    monkeypatch.setattr(transitions, "hand_over", overtaken)
    bench.engine.stop(0)
    assert refused == [run_id]
    run = Run.objects.get(pk=run_id)
    assert (run.status, run.worker_id, run.lease_losses) == ("running", None, 0)
