"""Tests of each status of a run, through the API with a real engine."""

import json
from functools import partial

import pytest

from config.api.openapi import described
from credits import ledger, sums
from runs import lifecycle, services
from runs.lifecycle import sweeps
from runs.models import Run, Waitpoint
from tests import factories
from tests.driver import until
from tests.lifecycle.conftest import joined
from webhooks.events import Event
from webhooks.models import Delivery

pytestmark = pytest.mark.django_db(transaction=True)


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


def test_tool_call_is_executed_and_charged_and_its_result_reaches_the_model(bench, events):
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


def fields_of(event: str) -> list[str]:
    """The fields of a webhook's body, as the API document has them."""
    return [*described("webhook_fields"), *Event(event).fields]


@pytest.mark.parametrize(("last", "last_event"), [("/say done", "agent.completed"), ("/fail broken", "agent.failed")])
def test_webhook_events_contain_the_id_of_the_causing_request(bench, user, last, last_event):
    factories.EndpointFactory(user=user)
    run = bench.finish(f'/call calculate {{"expression": "6*7"}}\n{last}')
    cause = Run.objects.get(pk=run["id"]).request_id
    assert cause
    assert set(Delivery.objects.values_list("event_type", "run_id", "request_id")) == {
        (name, run["id"], cause) for name in ("agent.started", "tool.completed", last_event)
    }
    for event, body in Delivery.objects.values_list("event_type", "body"):
        assert list(json.loads(body)) == fields_of(event)


def test_extended_events_report_waits_and_cancels(bench, user):
    for owner in (user, None):
        factories.EndpointFactory(user=owner, extended_events=True)
    run = bench.ask("/ask Which one?")
    bench.cancel(run["id"])
    for owner in (user, None):
        rows = Delivery.objects.filter(endpoint__user=owner).order_by("created_at", "pk")
        assert [row.event_type for row in rows] == ["agent.started", "agent.waiting", "agent.cancelled"]
        for row in rows:
            own = [] if owner else ["userId"]
            assert list(json.loads(row.body)) == [*fields_of(row.event_type), *own]
        waiting = json.loads(rows[1].body)
        asked = run["pendingWaitpoint"]
        assert (waiting["waitpointId"], waiting["kind"], waiting["expiresAt"]) == (
            asked["id"],
            "CLARIFICATION",
            asked["expiresAt"],
        )
    stopped = bench.start("/wait 60")
    bench.wait(stopped["id"], "running")
    bench.cancel(stopped["id"])
    bench.wait(stopped["id"])
    assert Delivery.objects.filter(run_id=stopped["id"], event_type="agent.cancelled").count() == 2
    assert lifecycle.violations() == []


def test_usage_is_charged_exactly(bench):
    run = bench.finish("/usage 1000 2000\n/say ok")
    assert run["totalCreditsUsed"] == 3.5
    assert bench.credits() == {"balance": "96.5", "held": "0", "available": "96.5", "expiring": []}


def test_calls_of_one_turn_run_concurrently(bench):
    run = bench.finish('/call calculate {"expression": "1+1"}\n/call calculate {"expression": "2+2"}\n/say {result}')
    calls = run["toolInvocations"]
    assert [(call["turnIndex"], call["callIndex"], call["status"]) for call in calls] == [
        (1, 1, "COMPLETED"),
        (1, 2, "COMPLETED"),
    ]
    assert bench.content(run) == "4"


def test_call_waits_for_approval_and_is_then_charged(bench, events):
    started = bench.start('/call draw_chart {"title": "T", "series": [1, 2]}\n/say done')
    run = bench.wait(started["id"], "waiting")
    waitpoint = run["pendingWaitpoint"]
    assert waitpoint["kind"] == "CREDIT_APPROVAL"
    assert waitpoint["status"] == "PENDING"
    (call,) = run["toolInvocations"]
    assert waitpoint["requestPayload"] == {
        "toolName": "draw_chart",
        "estimatedCredits": 12,
        "threshold": 10,
        "toolInvocationId": call["id"],
        "input": {"title": "T", "series": [1, 2]},
    }
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


def test_refused_call_costs_nothing_and_the_run_continues(bench):
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


@pytest.mark.parametrize("approved", [True, False])
def test_the_reason_of_an_answer_is_kept_and_a_refusals_is_told_to_the_model(bench, approved):
    run = bench.ask('/call draw_chart {"title": "T", "series": [1]}\n/say {result}')
    answered = bench.respond(run, kind="CREDIT_APPROVAL", approved=approved, reason="Too dear 🦊")
    assert answered["resolvedPayload"] == {
        "approved": approved,
        "reason": "Too dear 🦊",
        "respondedAt": answered["resolvedAt"],
    }
    run = bench.wait(run["id"])
    told = "APPROVAL_REFUSED: The user refused the call: Too dear 🦊"
    assert (told in run["answer"]) is not approved
    assert run["toolInvocations"][0]["errorMessage"] == (None if approved else told.partition(": ")[2])


@pytest.mark.parametrize("reason", ["", "x" * 1001, 5, []])
def test_a_reason_has_1_to_1000_characters(bench, reason):
    run = bench.ask('/call draw_chart {"title": "T", "series": [1]}')
    path = f"/waitpoints/{run['pendingWaitpoint']['id']}/respond"
    answer = bench.http.post(path, {"kind": "CREDIT_APPROVAL", "approved": False, "reason": reason})
    assert answer.status_code == 400
    assert list(answer.json()["error"]["details"]["fields"]) == ["reason"]
    assert bench.get(run["id"])["status"] == "waiting"
    bench.respond(run, kind="CREDIT_APPROVAL", approved=False, reason="x" * 1000)
    bench.wait(run["id"])


def test_approval_threshold_of_the_run_overrides_the_default(bench):
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


# Bodies that answer no waitpoint: misspelt, missing, of a wrong type, with a field too many.
NO_ANSWERS = [
    {},
    {"kind": "CLARIFICATION"},
    {"kind": "CLARIFICATION", "anwser": "blue"},
    {"kind": "CLARIFICATION", "answer": ""},
    {"kind": "CLARIFICATION", "answer": "blue", "approved": True},
    {"kind": "NOTHING", "answer": "blue"},
    {"kind": None, "answer": {"a": [1]}},
    {"kind": "CREDIT_APPROVAL", "approved": "true"},
    {"approved": True},
    {"anything": [{"at": "all"}]},
]
NO_OBJECTS = [b"[]", b"null", b'"blue"', b"{", b"1", b"\xff"]


def test_only_an_answer_resolves_a_waitpoint_and_a_resolved_one_accepts_any_object(bench, user):
    run = bench.ask("/ask Which colour?\n/say {result}")
    stranger = factories.session_client(factories.UserFactory())
    url = f"waitpoints/{run['pendingWaitpoint']['id']}"
    surfaces = [(bench.client, "/api/v1"), (factories.public_client(user), "/api/public/v1")]

    def answers(client, surface):
        made = [client.post(f"{surface}/{url}/respond", body, format="json") for body in NO_ANSWERS]
        return [*made, client.post(f"{surface}/{url}/respond")]

    def no_objects(client, surface):
        path = f"{surface}/{url}/respond"
        return [client.generic("POST", path, raw, content_type="application/json") for raw in NO_OBJECTS]

    for client, surface in surfaces:
        assert {answer.status_code for answer in answers(client, surface) + no_objects(client, surface)} == {400}
        assert client.get(f"{surface}/{url}").json() == run["pendingWaitpoint"]
    assert {answer.status_code for answer in answers(stranger, "/api/v1")} == {404}
    answered = bench.respond(run, kind="CLARIFICATION", answer="blue")
    for client, surface in surfaces:
        again = answers(client, surface)
        assert [(answer.status_code, answer.json()) for answer in again] == [(200, answered)] * len(again)
        assert {answer.status_code for answer in no_objects(client, surface)} == {400}
    assert {answer.status_code for answer in answers(stranger, "/api/v1")} == {404}
    assert bench.content(bench.wait(run["id"])) == "blue"


def test_expired_waitpoint_accepts_any_object(bench):
    run = bench.ask("/ask Which colour?")
    bench.cancel(run["id"])
    url = f"/api/v1/waitpoints/{run['pendingWaitpoint']['id']}"
    for body in NO_ANSWERS:
        answer = bench.client.post(f"{url}/respond", body, format="json")
        assert (answer.status_code, answer.json()) == (200, bench.client.get(url).json())
    assert answer.json()["status"] == "EXPIRED"


def test_two_questions_in_one_turn_are_asked_in_sequence(bench):
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


def test_late_answer_expires_the_waitpoint_before_the_sweep(bench, settings):
    settings.WAITPOINT_EXPIRY_SECONDS = 0
    run = bench.wait(bench.start("/ask Anyone?")["id"], "waiting", "failed")
    late = bench.client.post(
        f"/api/v1/waitpoints/{Waitpoint.objects.get().pk}/respond",
        {"kind": "CLARIFICATION", "answer": "me"},
        format="json",
    )
    assert (late.status_code, late.json()["status"]) == (200, "EXPIRED")
    assert bench.get(run["id"])["errorCode"] == "WAITPOINT_EXPIRED"


def test_cancel_a_queued_run(session, nudges):
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
    cancel = partial(bench.client.post, f"/api/v1/runs/{second['id']}/cancel", HTTP_IDEMPOTENCY_KEY="k")
    assert [cancel().status_code for _ in range(2)] == [200, 200]
    assert bench.client.delete(f"/api/v1/chats/{chat}").status_code == 204
    assert cancel().status_code == 404  # not the run as it was
    assert set(Run.objects.values_list("status", flat=True)) == {"cancelled"}
    for path in (
        f"runs/{first['id']}",
        f"runs/{second['id']}",
        f"chats/{chat}",
        f"waitpoints/{Waitpoint.objects.get().pk}",
    ):
        assert bench.client.get(f"/api/v1/{path}").status_code == 404


def test_run_answered_during_a_read_is_not_shown_as_waiting(bench, monkeypatch):
    run = bench.wait(bench.start("/ask Which?\n/wait 30")["id"], "waiting")
    read = services._pending

    def answered_first(run_id: str) -> list[Waitpoint]:
        bench.respond(run, kind="CLARIFICATION", answer="blue")
        return read(run_id)

    monkeypatch.setattr(services, "_pending", answered_first)
    shown = bench.get(run["id"])
    assert shown["pendingWaitpoint"] is None
    assert shown["status"] in ("queued", "running")
    bench.cancel(run["id"])


def test_balance_equals_the_grant_minus_the_costs_of_the_runs(bench, user):
    for _ in range(3):
        bench.finish('/call calculate {"expression": "1"}\n/call calculate {"expression": "1/0"}\n/say x')
    account = ledger.account_for(user.pk)
    assert account.held == 0
    spent = sum(sums.committed(run.pk) for run in Run.objects.all())
    assert account.balance == 100_000_000 - spent
