"""Calls that take long: http tools that answer 202 and call back."""

import io
import json
from base64 import b64encode
from datetime import timedelta
from urllib.parse import urlsplit

import pytest
from cryptography.fernet import Fernet
from django.core.management import call_command
from django.core.signing import Signer
from django.test import Client
from django.utils.dateparse import parse_datetime
from standardwebhooks.webhooks import Webhook

from config.api.openapi import described
from config.kernel import clock
from config.limits.window import Bucket, Verdict
from credits import ledger
from runs import catalogue, lifecycle
from runs.models import Run, Tool, ToolInvocation
from runs.privacy import export
from runs.tools import http
from tests.driver import until
from tests.lifecycle import conftest as engine_fixtures

engines = engine_fixtures.engines
bench = engine_fixtures.bench
events = engine_fixtures.events


def add_tool(server, name="film", **columns) -> Tool:
    columns = {"price": 2_000_000, "park_seconds": 600, "description": "Makes a film."} | columns
    tool = Tool.objects.create(name=name, display_name=name, node_type="http", url=f"{server.url}/{name}", **columns)
    catalogue.forget()
    catalogue.refresh()
    return tool


def call_back(path: str, body, content_type="application/json", **headers):
    body = body if isinstance(body, (bytes, str)) else json.dumps(body)
    return Client().generic("POST", path, body, content_type, headers=headers)


def park(bench, server, message="/call film {}\n/say It is {result}.", **body):
    """A run that is parked, with its only call."""
    server.status = 202
    run = bench.start(message, **body)
    until(lambda: Run.objects.filter(pk=run["id"], parked=True).exists(), describe=lambda: bench.get(run["id"]))
    run = bench.get(run["id"])
    return run, run["toolInvocations"][-1]


def kinds(happened) -> list[str]:
    return [kind for kind, _ in happened]


def test_a_parked_call_holds_its_credits_and_no_worker_until_the_tool_calls_back(bench, server, events):
    add_tool(server)
    run, call = park(bench, server)
    assert (run["status"], run["awaiting"], run["finishedAt"]) == ("running", "tool", None)
    assert (call["status"], call["awaiting"], call["progress"]) == ("DISPATCHING", "tool", None)
    (received,) = server.received
    assert received.json["callback"]["expiresAt"] == call["expiresAt"]
    left = parse_datetime(call["expiresAt"]) - parse_datetime(call["startedAt"])
    assert left == timedelta(seconds=600)
    row = Run.objects.get()
    assert (row.worker_id, row.running_since) == (None, None)
    until(lambda: not bench.engine.tasks)
    assert bench.credits()["held"] == "2"
    assert bench.http.get("/runs?awaiting=tool").json()["items"][0]["id"] == run["id"]
    assert bench.http.get("/runs?awaiting=client").json()["items"] == []

    answer = call_back(
        server.callback(), {"result": "a film", "creditUsed": 0.5, "resultUrls": ["https://a.example/f"]}
    )
    assert answer.status_code == 200
    assert answer.json() == {"toolInvocationId": call["id"], "status": "COMPLETED", "accepted": True}
    run = bench.wait(run["id"])
    assert run["answer"] == "It is a film\nhttps://a.example/f."
    (call,) = run["toolInvocations"]
    assert (call["awaiting"], call["expiresAt"], call["progress"]) == (None, None, None)
    assert (call["status"], call["creditUsed"], run["awaiting"]) == ("COMPLETED", 0.5, None)
    assert bench.credits()["held"] == "0"
    happened = events(run["id"])
    assert [kind for kind in kinds(happened) if kind.startswith("tool.")] == [
        "tool.started",
        "tool.parked",
        "tool.completed",
    ]
    seen = dict(happened)
    assert seen["tool.started"]["awaiting"] is None
    assert seen["tool.parked"] == {
        "toolInvocationId": call["id"],
        "name": "film",
        "turnIndex": 1,
        "callIndex": 1,
        "awaiting": "tool",
        "expiresAt": received.json["callback"]["expiresAt"],
    }
    assert (seen["tool.completed"]["result"], seen["tool.completed"]["resultTruncated"]) == (call["result"], False)
    assert [data["status"] for kind, data in happened if kind == "run.status"] == ["queued", "running", "completed"]
    assert list(lifecycle.violations()) == []
    again = call_back(server.callback(), {"error": "no"}).json()
    assert again == {"toolInvocationId": call["id"], "status": "COMPLETED", "accepted": False}


def test_without_park_seconds_202_is_a_result(bench, server):
    add_tool(server, park_seconds=None)
    server.status = 202
    server.answers({"result": "done"})
    assert bench.finish("/call film {}\n/say {result}")["answer"] == "done"
    assert "callback" not in server.received[0].json


@pytest.mark.parametrize(
    ("body", "seconds", "message"),
    [({"message": "In line", "expiresInSeconds": 90}, 90, "In line"), (b"Accepted", 600, None), ([1], 600, None)],
)
def test_the_answer_202_may_say_more(bench, server, body, seconds, message, events):
    add_tool(server)
    server.answers(body)
    run, call = park(bench, server)
    left = parse_datetime(call["expiresAt"]) - parse_datetime(call["startedAt"])
    assert timedelta(seconds=seconds) <= left < timedelta(seconds=seconds + 30)
    assert (call["progress"] or {}).get("message") == message
    assert ("tool.progress" in kinds(events(run["id"]))) == (message is not None)


def test_an_error_is_told_to_the_model_and_costs_nothing(bench, server):
    add_tool(server)
    run, call = park(bench, server)
    path = server.callback()
    assert call_back(path, {"error": f"Out of film. {path}"}).json()["accepted"]
    run = bench.wait(run["id"])
    assert run["answer"] == "It is TOOL_ERROR: Out of film. /api/callbacks/[callback]."
    (call,) = run["toolInvocations"]
    assert (call["status"], call["errorCode"], call["creditUsed"]) == ("FAILED", "TOOL_ERROR", 0)
    assert bench.credits()["held"] == "0"


@pytest.mark.parametrize("name", ["result", "error", "progress"])
def test_the_examples_of_the_api_document_are_accepted(bench, server, name):
    add_tool(server)
    park(bench, server)
    documented = described("paths")["/api/callbacks/{token}"]["post"]["requestBody"]["content"]["application/json"]
    answer = call_back(server.callback(), documented["examples"][name]["value"])
    status = {"result": "COMPLETED", "error": "FAILED", "progress": "DISPATCHING"}[name]
    assert (answer.status_code, answer.json()["status"], answer.json()["accepted"]) == (200, status, True)


@pytest.mark.parametrize(
    ("body", "content_type", "told"),
    [
        (b"a film", "text/plain", "a film"),
        ([1, 2], "application/json", "[1,2]"),
        ({"film": 1}, "application/json", '{"film":1}'),
        ({"result": {"a": None}}, "application/x-www-form-urlencoded", '{"a":null}'),
        ({"result": None}, "application/json", "null"),
        ("Größe".encode("latin-1"), "text/plain; charset=iso-8859-1", "Größe"),
        ({"result": "nul \0 and \ud800"}, "application/json", "nul  and \ufffd"),
    ],
)
def test_any_json_or_text_is_a_result(bench, server, body, content_type, told):
    add_tool(server)
    run, _ = park(bench, server, "/call film {}\n/say done")
    assert call_back(server.callback(), body, content_type).json()["accepted"]
    (call,) = bench.wait(run["id"])["toolInvocations"]
    assert (call["status"], call["result"], call["creditUsed"]) == ("COMPLETED", told, 2)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"result": 1', "body"),
        (b'{"result": NaN}', "body"),
        (b"\xff", "body"),
        (b"", "body"),
        ({"result": 1, "error": "no"}, "error"),
        ({"result": 1, "resultUrls": "x"}, "result"),
        ({"result": 1, "resultUrls": ["javascript:alert(1)"]}, "result"),
        ({"result": 1, "creditUsed": -1}, "result"),
        ({"result": 1, "creditUsed": "1"}, "result"),
        ({"error": ""}, "error"),
        ({"error": "x" * 1001}, "error"),
        ({"error": 5}, "error"),
        ({"progress": 5}, "progress"),
        ({"progress": {"fraction": 1.1}}, "progress.fraction"),
        ({"progress": {"fraction": True}}, "progress.fraction"),
        ({"progress": {"message": "x" * 301}}, "progress.message"),
        (b"[" + b"1," * 250_001 + b"1]", "body"),
    ],
)
def test_a_callback_that_does_not_fit_leaves_the_call_open(bench, server, body, field):
    add_tool(server)
    _, call = park(bench, server)
    answer = call_back(server.callback(), body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], list(error["details"]["fields"])) == ("VALIDATION_ERROR", [field])
    assert ToolInvocation.objects.get().awaiting == "tool"
    assert call_back(server.callback(), {"result": 1, "creditUsed": 1e300}).json()["accepted"]
    assert ToolInvocation.objects.get().credit_used == 2_000_000


def test_progress_is_shown_and_comes_at_most_once_a_second(bench, server, events):
    add_tool(server)
    run, call = park(bench, server)
    path, body = server.callback(), {"progress": {"fraction": 0.25, "message": "25 of 100"}}
    assert call_back(path, body).json() == {"toolInvocationId": call["id"], "status": "DISPATCHING", "accepted": True}
    assert not call_back(path, {"progress": {"fraction": 0.3}}).json()["accepted"]
    (shown,) = bench.get(run["id"])["toolInvocations"]
    assert (shown["progress"]["fraction"], shown["progress"]["message"]) == (0.25, "25 of 100")
    assert shown["expiresAt"] == call["expiresAt"]
    (progress,) = [data for kind, data in events(run["id"]) if kind == "tool.progress"]
    assert progress == {"toolInvocationId": call["id"], "name": "film", **shown["progress"]}


def test_progress_does_not_disturb_a_worker(bench, server, monkeypatch):
    """Each one that is kept makes the run's worker read the run again."""
    monkeypatch.setattr("runs.lifecycle.calls.PROGRESS_SECONDS", 600)
    add_tool(server)
    server.status = 202
    add_tool(server, "slow", park_seconds=None)
    server.routes["/slow"] = 200, {}, b'"slow"'
    server.held.add("/slow")
    run = bench.start("/call film {}\n/call film {}\n/call slow {}\n/say {result}")
    until(lambda: len(server.received) == 3 and ToolInvocation.objects.filter(awaiting="tool").count() == 2)
    films = ToolInvocation.objects.filter(name="film").values_list("pk", flat=True)
    first, second = (urlsplit(http.callback_url(call)).path for call in films)
    before = bench.get(run["id"])["lastStreamIndex"]
    for _ in range(20):
        assert not call_back(first, {"progress": {"fraction": 0.5}}).json()["accepted"]
    assert bench.get(run["id"])["lastStreamIndex"] == before
    server.release.set()
    until(lambda: Run.objects.filter(parked=True).exists())
    accepted = [call_back(path, {"progress": {"fraction": 0.5}}).json()["accepted"] for path in (first, first, second)]
    assert accepted == [True, False, True]


def test_an_address_is_of_one_call_and_exact(bench, server):
    add_tool(server)
    _, call = park(bench, server)
    path = server.callback()
    token = path.rpartition("/")[2]
    other = "inv_" + "0" * 26
    wrong = [
        token[:-1],
        token + "A",
        token + "=",
        token.swapcase(),
        f"{other}.{token.partition('.')[2]}",
        call["id"],
        f"{call['id']}.",
        Signer(key="another key", sep=".", salt="runs.callbacks").sign(call["id"]),
        Signer(sep=".", salt="runs.files").sign(call["id"]),
        http.callback_url(other).rpartition("/")[2],
        "x" * 10_000,
        "%00",
        "é",
    ]
    for guess in wrong:
        assert call_back(f"/api/callbacks/{guess}", {"result": 1}).status_code == 404, guess
    assert call_back(path + "/", {"result": 1}).status_code == 404
    assert Client().get(path).status_code == 405
    assert call_back(path, {"result": 1}).json()["accepted"]


def test_an_address_holds_during_a_change_of_the_key(bench, server, settings):
    add_tool(server)
    park(bench, server)
    old = settings.SECRET_KEY
    settings.SECRET_KEY = "b" * 50
    assert call_back(server.callback(), {"result": 1}).status_code == 404
    settings.SECRET_KEY_FALLBACKS = [old]
    assert call_back(server.callback(), {"result": 1}).json()["accepted"]


def test_a_callback_before_the_202_counts(bench, server):
    add_tool(server)
    server.status, server.hold = 202, True
    run = bench.start("/call film {}\n/say It is {result}.")
    assert server.arrived.wait(10)
    assert call_back(server.callback(), {"result": "quick"}).json()["accepted"]
    server.release.set()
    assert bench.wait(run["id"])["answer"] == "It is quick."


def test_a_call_expires_and_the_run_goes_on(bench, server):
    add_tool(server)
    run, call = park(bench, server)
    ToolInvocation.objects.update(expires_at=clock.now())
    run = bench.wait(run["id"])
    assert run["answer"] == "It is TOOL_TIMEOUT: film gave no outcome in time.."
    assert (run["totalCreditsUsed"], bench.credits()["held"]) == (run["totalCreditsUsed"], "0")
    answer = call_back(server.callback(), {"result": "late"})
    assert answer.json() == {"toolInvocationId": call["id"], "status": "FAILED", "accepted": False}


def test_a_callback_after_the_time_expires_the_call_itself(bench, server, monkeypatch):
    monkeypatch.setattr("runs.lifecycle.sweeps.calls.expire_call", lambda key: False)
    add_tool(server)
    run, call = park(bench, server)
    ToolInvocation.objects.update(expires_at=clock.now())
    assert call_back(server.callback(), {"result": "late"}).json()["status"] == "FAILED"
    assert bench.wait(run["id"])["toolInvocations"][0]["errorCode"] == "TOOL_TIMEOUT"


def test_a_cancel_ends_a_parked_run_at_once_and_the_tool_is_told(bench, server):
    add_tool(server, cancel_url=f"{server.url}/cancel", secret_headers='{"Authorization": "Bearer sesame"}')
    run, call = park(bench, server)
    server.status = 200
    run = bench.cancel(run["id"])
    assert (run["status"], run["awaiting"]) == ("cancelled", None)
    (call,) = run["toolInvocations"]
    assert (call["status"], call["errorCode"], call["awaiting"]) == ("FAILED", "OUTCOME_UNKNOWN", None)
    assert bench.credits()["held"] == "0"
    until(lambda: len(server.received) == 2)
    told = server.received[1]
    assert (told.path, told.headers["Authorization"]) == ("/cancel", "Bearer sesame")
    about = {name: server.received[0].json[name] for name in ("invocationId", "runId", "chatId", "userId")}
    assert told.json == about | {"reason": "run_cancelled"}
    until(lambda: ToolInvocation.objects.get().contact_at is None)
    assert not call_back(server.callback(0), {"result": 1}).json()["accepted"]
    assert list(lifecycle.violations()) == []


def test_a_cancel_notice_is_tried_three_times(bench, server):
    add_tool(server, cancel_url=f"{server.url}/cancel")
    run, _ = park(bench, server)
    server.status = 500
    bench.cancel(run["id"])
    for attempt, seconds in enumerate((30, 60), 1):
        until(lambda attempt=attempt: len(server.received) == 1 + attempt)
        # Also after a late attempt, the next one comes later.
        again = ToolInvocation.objects.get().contact_at
        assert timedelta(seconds=seconds - 5) < again - clock.now() <= timedelta(seconds=seconds)
        ToolInvocation.objects.update(contact_at=clock.now() - timedelta(hours=1))
    until(lambda: len(server.received) == 4)
    assert ToolInvocation.objects.get().contact_at is None


def test_parked_runs_take_no_place_and_resume_one_after_another(bench, server, settings):
    settings.RUN_USER_LIMIT = 1
    add_tool(server)
    parked = [park(bench, server)[0]["id"] for _ in range(3)]
    third = bench.finish("/say hello")
    assert third["status"] == "completed"
    running = bench.start("/wait 600")
    bench.wait(running["id"], "running")
    for at in range(3):
        assert call_back(server.callback(at), {"result": at}).json()["accepted"]
    until(lambda: Run.objects.filter(throttled=True).count() == 3)
    assert list(lifecycle.violations()) == []
    bench.cancel(running["id"])
    for run in parked:
        assert bench.wait(run)["status"] == "completed"


def test_a_user_has_a_bounded_number_of_parked_calls(bench, server, settings):
    settings.PARKED_CALLS_PER_USER = 2
    add_tool(server)
    for _ in range(2):
        park(bench, server)
    run = bench.finish("/call film {}\n/say {result}")
    assert run["answer"] == "TOOL_ERROR: Too many calls of the user await their outcome."
    assert len(server.received) == 2, "no server begins work that could not be awaited"
    assert call_back(server.callback(0), {"result": 1}).json()["accepted"]
    until(lambda: Run.objects.filter(parked=True).count() == 1)
    park(bench, server)


def test_the_turn_goes_on_when_its_last_call_has_ended(bench, server, events):
    """A parked call beside one that works and one that needs an approval."""
    add_tool(server)
    films, sum_of = '/call film {}\n/call film {"n": 2}', '/call calculate {"expression": "6*7"}'
    message = f'{films}\n{sum_of}\n/call draw_chart {{"title": "t", "series": [1]}}\n/say {{result}}'
    server.status = 202
    run = bench.ask(message)
    assert (run["status"], run["awaiting"]) == ("waiting", "tool")
    assert call_back(server.callback(0), {"result": 1}).json()["accepted"]
    assert bench.get(run["id"])["status"] == "waiting"
    bench.respond(run, kind="CREDIT_APPROVAL", approved=False)
    until(lambda: Run.objects.filter(parked=True).exists())
    assert call_back(server.callback(1), {"result": 2}).json()["accepted"]
    run = bench.wait(run["id"])
    assert [call["status"] for call in run["toolInvocations"]] == ["COMPLETED", "COMPLETED", "COMPLETED", "REFUSED"]
    assert kinds(events(run["id"])).count("tool.completed") == 4


def test_a_signed_callback_is_required_of_a_tool_with_a_secret(bench, server):
    secret = b64encode(b"a tool's own signing secret").decode()
    add_tool(server, signing_secret=secret)
    park(bench, server)
    path, body = server.callback(), json.dumps({"result": 1})
    now = clock.now()

    def signed(at, key=secret, name="msg_1", body=body):
        signature = Webhook(key).sign(name, at, body)
        return {"webhook-id": name, "webhook-timestamp": str(int(at.timestamp())), "webhook-signature": signature}

    other = b64encode(b"another signing secret of x").decode()
    wrong = [{}, signed(now, other), signed(now - timedelta(seconds=301)), signed(now + timedelta(seconds=302))]
    wrong += [signed(now, body="{}"), signed(now) | {"webhook-timestamp": "1e3"}, signed(now) | {"webhook-id": "x"}]
    for headers in wrong:
        answer = call_back(path, body, **headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "UNAUTHORIZED"), headers
    headers = signed(now - timedelta(seconds=290))
    headers["webhook-signature"] = f"v1,AAAA {headers['webhook-signature']}"
    assert call_back(path, body, **headers).json()["accepted"]


@pytest.mark.parametrize("must_sign", [True, False])
def test_a_tool_that_is_renamed_must_sign_as_before(bench, server, must_sign):
    tool = add_tool(server, signing_secret=b64encode(b"a tool's own signing secret").decode() if must_sign else None)
    park(bench, server)
    Tool.objects.filter(pk=tool.pk).update(name="movie")
    assert call_back(server.callback(), {"result": 1}).status_code == (401 if must_sign else 200)
    assert ToolInvocation.objects.get().awaiting == ("tool" if must_sign else None)


def test_a_callback_waits_until_its_signing_secret_can_be_read(bench, server, settings):
    add_tool(server, signing_secret=b64encode(b"a tool's own signing secret").decode())
    park(bench, server)
    keys, settings.ENCRYPTION_KEYS = settings.ENCRYPTION_KEYS, [Fernet.generate_key().decode()]
    answer = call_back(server.callback(), {"result": 1})
    settings.ENCRYPTION_KEYS = keys
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "UNAVAILABLE")
    assert ToolInvocation.objects.get().awaiting == "tool"


def test_staff_may_allow_unsigned_callbacks(bench, server):
    add_tool(server, signing_secret="c2VzYW1lc2VzYW1l", unsigned_callbacks=True)
    park(bench, server)
    assert call_back(server.callback(), {"result": 1}).json()["accepted"]


def test_a_deleted_chat_ends_its_parked_call(bench, server):
    add_tool(server)
    run, _ = park(bench, server)
    assert bench.client.delete(f"/api/v1/chats/{run['chatId']}").status_code == 204
    answer = call_back(server.callback(), {"result": 1})
    assert (answer.json()["status"], answer.json()["accepted"]) == ("FAILED", False)
    assert bench.credits()["held"] == "0"


def test_a_step_does_not_wait_for_the_hold_of_a_parked_call(bench, server, user, settings):
    settings.SIGNUP_CREDITS = "100"
    add_tool(server, price=60_000_000, approval="never")
    park(bench, server)
    add_tool(server, "other", price=60_000_000, approval="never")
    run = bench.finish("/call other {}\n/say {result}")
    assert run["toolInvocations"][0]["errorCode"] == "INSUFFICIENT_CREDITS"
    assert ledger.account_for(user.pk).held == 60_000_000


def test_no_log_line_error_or_export_has_the_address(bench, server, user, caplog, monkeypatch):
    add_tool(server)
    server.status, server.body = 500, b""
    run = bench.start("/call film {}\n/say {result}")
    until(lambda: server.received)
    token = server.callback().rpartition("/")[2]
    bench.wait(run["id"])
    # The tool shows the request that it got.
    server.body = json.dumps({"got": server.received[0].json}).encode()
    told = bench.finish("/call film {}\n/say {result}")["toolInvocations"][0]["errorMessage"]
    assert "[callback]" in told
    run, call = park(bench, server)
    token = server.callback().rpartition("/")[2]
    monkeypatch.setattr("runs.pages.parse_signing_secret", None)  # a fault of the service
    with caplog.at_level("DEBUG"):
        answer = call_back(server.callback(), {"result": 1})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "INTERNAL_ERROR")
    assert "a callback failed" in caplog.text
    for text in (caplog.text, answer.content.decode(), "\n".join(export(user)), json.dumps(bench.get(run["id"]))):
        assert token not in text
        assert token.partition(".")[2] not in text


def test_a_call_has_a_bounded_number_of_callbacks_a_minute(bench, server, monkeypatch):
    taken = []

    def charge(*buckets):
        taken.extend(bucket for bucket in buckets if bucket.name.startswith("callback:"))
        return Verdict(len(taken) <= 2, 60, 0, 30, 30)

    monkeypatch.setattr("config.api.ratelimit.charge", charge)
    add_tool(server)
    _, call = park(bench, server)
    answers = [call_back(server.callback(), {"progress": {"fraction": 0.1}}) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert answers[2]["Retry-After"] == "30"
    assert set(taken) == {Bucket(f"callback:{call['id']}", 60)}


def test_a_callback_has_a_size_limit(bench, server, settings):
    settings.TOOL_ANSWER_MAX_BYTES = 2000
    add_tool(server)
    run, _ = park(bench, server)
    answer = call_back(server.callback(), b"x" * 2001, "text/plain")
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "PAYLOAD_TOO_LARGE")
    assert call_back(server.callback(), b"x" * 2000, "text/plain").json()["accepted"]
    assert bench.wait(run["id"])["toolInvocations"][0]["result"] == "x" * 2000


def test_an_erased_user_has_no_calls(bench, server, user, monkeypatch):
    monkeypatch.setattr("runs.privacy.ERASE_SETTLE_SECONDS", 0)
    add_tool(server)
    park(bench, server)
    call_command("erase_user", user.username, reason="Asked", yes=True, stdout=io.StringIO(), stderr=io.StringIO())
    assert call_back(server.callback(), {"result": 1}).status_code == 404


def test_staff_see_until_when_a_call_is_parked_and_how_far_it_is(bench, server, admin_client):
    add_tool(server)
    run, call = park(bench, server)
    call_back(server.callback(), {"progress": {"fraction": 0.25, "message": "a secret film"}})
    page = admin_client.get(f"/admin/runs/run/{run['id']}/change/").content.decode()
    until_when = parse_datetime(call["expiresAt"])
    assert f"awaits its tool until {until_when:%Y-%m-%d %H:%M} UTC, 25% done" in page
    assert "a secret film" not in page
