"""Tests of the tools of POST /api/mcp and of the requests that they refuse."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from django.conf import settings
from django.db import connection

from apikeys.keys import DEFAULT_SCOPES
from chats.models import Chat
from config.api import ratelimit
from config.api.ratelimit import Verdict
from runs.calls import ANSWERS
from runs.models import Run
from runs.serializers import RunInput
from runs.streams import hub
from runs.streams.hub import Hub
from tests import factories
from tests.contract.world import build, unknown_ids
from tests.credits.helpers import fund
from tests.mcp.rpc import TOOLS, call, done, refused, rpc

pytestmark = pytest.mark.django_db


@pytest.fixture(scope="module", autouse=True)
def streams_leave_the_database() -> Iterator[None]:
    """Close the connections of the stream threads, which outlive the tests and would block the database's removal."""
    yield
    if Hub.of_process is not None:
        threads = hub.STREAM_DB_THREADS
        together = threading.Barrier(threads)

        def leave() -> None:
            connection.close()
            together.wait(30)  # so that each task runs on another thread

        for left in [Hub.of_process.threads.submit(leave) for _ in range(threads)]:
            left.result()


class TestTools:
    def test_every_input_schema_is_valid(self, public):
        from jsonschema import Draft202012Validator

        for tool in rpc(public, "tools/list").json()["result"]["tools"]:
            Draft202012Validator.check_schema(tool["inputSchema"])
            assert tool["inputSchema"]["type"] == "object"
            assert set(tool["inputSchema"].get("required", ())) <= set(tool["inputSchema"]["properties"])

    def test_schemas_match_the_serializers(self, public):
        listing = rpc(public, "tools/list").json()["result"]["tools"]
        schemas = {tool["name"]: tool["inputSchema"] for tool in listing}
        start, respond = schemas["start_run"], schemas["respond_to_waitpoint"]
        assert set(start["properties"]) == {*RunInput().fields, "chatId", "waitSeconds", "idempotencyKey"}
        assert set(start["required"]) == {"chatId"}
        assert start["properties"]["message"]["maxLength"] == settings.MESSAGE_MAX_CHARS
        assert start["properties"]["tools"]["items"] == {"type": "string", "minLength": 1, "maxLength": 64}
        assert set(respond["properties"]) == {
            "waitpointId",
            "kind",
            "approved",
            "reason",
            "answer",
            "data",
            "declined",
            "maxCredits",
        }
        assert respond["properties"]["kind"]["enum"] == list(ANSWERS)
        assert set(respond["required"]) == {"waitpointId", "kind"}

    @pytest.mark.parametrize(("name", "scope"), TOOLS.items())
    def test_each_tool_needs_its_scope(self, user, name, scope):
        others = factories.public_client(user, [other for other in DEFAULT_SCOPES if other != scope])
        error = refused(others, name)
        assert (error["code"], error["details"]) == ("FORBIDDEN", {"requiredScope": scope})
        alone = call(factories.public_client(user, [scope]), name)
        assert alone["structuredContent"].get("error", {}).get("code") != "FORBIDDEN"

    @pytest.mark.parametrize("missing", ["runs:read", "chats:read"])
    def test_no_tool_shows_text_to_a_key_that_may_not_read_it(self, user, missing):
        secret = "TEXT-OF-A-RUN"
        run = factories.RunFactory(chat__user=user, chat__title=secret, status="waiting", error_message=secret)
        invocation = factories.ToolInvocationFactory(run=run, input={"q": secret}, result=secret)
        waitpoint = factories.WaitpointFactory(run=run, request_payload={"question": secret})
        Chat.objects.filter(pk=run.chat_id).update(active_run_id=run.pk)
        everyone, partial = (
            factories.public_client(user, [scope for scope in DEFAULT_SCOPES if scope != left_out])
            for left_out in ("", missing)
        )
        chat = done(everyone, "create_chat", idempotencyKey="a")["id"]
        Chat.objects.filter(pk=chat).update(title=secret)
        answer = {"waitpointId": waitpoint.pk, "kind": "CLARIFICATION", "answer": secret}
        calls: dict[str, dict[str, Any]] = {
            "list_chats": {},
            "create_chat": {"idempotencyKey": "a"},
            "start_run": {"chatId": run.chat_id, "message": secret, "idempotencyKey": "b", "onActiveRun": "enqueue"},
            "get_run": {"runId": run.pk},
            "respond_to_waitpoint": answer,
            "submit_tool_result": {"toolInvocationId": invocation.pk, "result": secret},
            "cancel_run": {"runId": run.pk},
            "get_credits": {},
        }
        assert calls.keys() == TOOLS.keys()
        of_chats = {"list_chats", "create_chat"}
        hidden = of_chats if missing == "chats:read" else TOOLS.keys() - of_chats
        for name in [name for name in calls if name in hidden]:
            assert secret not in json.dumps(call(partial, name, **calls[name])), name
        shown = {name for name in calls if secret in json.dumps(call(everyone, name, **calls[name]))}
        assert shown == TOOLS.keys() - {"get_credits", "start_run"}
        if missing == "runs:read":
            assert done(partial, "cancel_run", runId=run.pk)["status"] == "cancelled"

    @pytest.mark.parametrize(
        ("name", "key", "arguments"),
        [
            ("start_run", "chatId", {"message": "Hello"}),
            ("get_run", "runId", {}),
            ("cancel_run", "runId", {}),
            ("respond_to_waitpoint", "waitpointId", {"kind": "CLARIFICATION", "answer": "x"}),
        ],
    )
    def test_object_of_another_user_is_not_found(self, public, name, key, arguments):
        strangers, nobodys = build(factories.UserFactory()).ids, unknown_ids()
        answers = [refused(public, name, **{key: ids[key]}, **arguments) for ids in (strangers, nobodys)]
        assert answers[0] == answers[1]
        assert answers[0]["code"] == "NOT_FOUND"
        for odd in ("\x7f", "x" * 5000, "run_' OR 1=1", "..%2F"):
            assert refused(public, name, **{key: odd}, **arguments)["code"] == "NOT_FOUND"

    def test_chats(self, public):
        made = [done(public, "create_chat", title=f"T{number}")["id"] for number in range(3)]
        page = done(public, "list_chats", limit=2)
        assert [chat["id"] for chat in page["items"]] == made[:0:-1]
        rest = done(public, "list_chats", limit=2, cursor=page["nextCursor"])
        assert [chat["id"] for chat in rest["items"]] == made[:1]
        assert rest["nextCursor"] is None
        assert "title" in refused(public, "create_chat", title="")["details"]["fields"]
        assert "cursor" in refused(public, "list_chats", cursor="%")["details"]["fields"]
        for limit in (0, "2", True):
            assert "limit" in refused(public, "list_chats", limit=limit)["details"]["fields"]

    def test_start_get_cancel(self, public, nudges):
        chat = done(public, "create_chat")["id"]
        run = done(public, "start_run", chatId=chat, message="Hello", maxCredits=0.5)
        assert (run["status"], run["chatId"], run["answer"]) == ("queued", chat, None)
        assert Run.objects.get(pk=run["id"]).max_credits == 500_000
        assert done(public, "get_run", runId=run["id"])["id"] == run["id"]
        assert refused(public, "start_run", chatId=chat, message="Again")["code"] == "RUN_IN_PROGRESS"
        assert done(public, "cancel_run", runId=run["id"])["status"] == "cancelled"
        assert done(public, "cancel_run", runId=run["id"])["status"] == "cancelled"

    @pytest.mark.parametrize(
        ("arguments", "field"),
        [
            ({}, "chatId"),
            ({"chatId": 3}, "chatId"),
            ({"waitSeconds": -1}, "waitSeconds"),
            ({"waitSeconds": 61}, "waitSeconds"),
            ({"waitSeconds": "1"}, "waitSeconds"),
            ({"waitSeconds": True}, "waitSeconds"),
            ({"message": ""}, "message"),
            ({"message": 3}, "message"),
            ({"tools": ["nonsense"]}, "tools.0"),
            ({"maxCredits": 0}, "maxCredits"),
            ({"onActiveRun": "queue"}, "onActiveRun"),
        ],
    )
    def test_start_run_refuses_invalid_arguments(self, user, public, arguments, field):
        chat = factories.ChatFactory(user=user)
        given = {"chatId": chat.pk, "message": "Hello"} | arguments if arguments else {"message": "Hello"}
        error = refused(public, "start_run", **given)
        assert error["code"] == "VALIDATION_ERROR"
        assert field in error["details"]["fields"]
        assert not Run.objects.exists()

    def test_repeated_call_with_an_idempotency_key_has_no_second_effect(self, public):
        first = done(public, "create_chat", title="T", idempotencyKey="a")
        assert done(public, "create_chat", idempotencyKey="a", title="T") == first
        assert Chat.objects.count() == 1
        given = {"chatId": first["id"], "message": "Hello", "idempotencyKey": "b"}
        run = done(public, "start_run", **given)
        assert done(public, "start_run", **given, waitSeconds=0) == run
        assert done(public, "cancel_run", runId=run["id"])["status"] == "cancelled"
        # The answer is the run of the first call in its current state.
        assert done(public, "start_run", **given, waitSeconds=5)["status"] == "cancelled"
        assert Run.objects.count() == 1

    def test_idempotency_key_belongs_to_one_call(self, user, public):
        chat = factories.ChatFactory(user=user)
        given = {"chatId": chat.pk, "idempotencyKey": "a", "onActiveRun": "enqueue"}
        first = done(public, "start_run", **given, message="Hello")
        assert refused(public, "start_run", **given, message="Bye")["code"] == "IDEMPOTENCY_KEY_REUSED"
        assert refused(public, "create_chat", idempotencyKey="a")["code"] == "IDEMPOTENCY_KEY_REUSED"
        stranger = factories.public_client(factories.UserFactory())
        assert done(stranger, "create_chat", idempotencyKey="a")
        assert done(public, "start_run", **given | {"idempotencyKey": "b"}, message="Hello")["id"] != first["id"]
        # Keys of tool calls and keys of the header Idempotency-Key are independent.
        headers = {"Idempotency-Key": "a"}
        assert public.post("/api/public/v1/chats", {}, format="json", headers=headers).status_code == 201

    def test_refused_call_releases_its_idempotency_key(self, user, public):
        chat = factories.ChatFactory(user=user)
        running = done(public, "start_run", chatId=chat.pk, message="Hello")
        given = {"chatId": chat.pk, "message": "Again", "idempotencyKey": "a"}
        assert refused(public, "start_run", **given)["code"] == "RUN_IN_PROGRESS"
        done(public, "cancel_run", runId=running["id"])
        assert done(public, "start_run", **given)["status"] == "queued"

    @pytest.mark.parametrize("key", ["", "x" * 256, "ключ", "\t", 5, None])
    def test_invalid_idempotency_key_is_refused(self, public, key):
        assert "idempotencyKey" in refused(public, "create_chat", idempotencyKey=key)["details"]["fields"]
        assert not Chat.objects.exists()

    def test_starts_are_limited(self, user, public, monkeypatch):
        charged: list[str] = []

        def charge(*buckets: ratelimit.Bucket) -> Verdict:
            charged.extend(bucket.name.partition(":")[0] for bucket in buckets)
            return Verdict(not any(bucket.name.startswith("run-starts") for bucket in buckets), 60, 0, 60, 9)

        monkeypatch.setattr(ratelimit, "charge", charge)
        chat = factories.ChatFactory(user=user)
        assert refused(public, "start_run", chatId=chat.pk, message="Hello")["code"] == "RATE_LIMITED"
        assert charged == ["public", "run-starts"]
        assert not Run.objects.exists()

    def test_respond(self, user, public):
        waitpoint = factories.WaitpointFactory(run__chat__user=user)
        Chat.objects.filter(pk=waitpoint.run.chat_id).update(active_run_id=waitpoint.run_id)
        wrong = refused(public, "respond_to_waitpoint", waitpointId=waitpoint.pk, kind="CREDIT_APPROVAL", approved=True)
        assert "kind" in wrong["details"]["fields"]
        given = {"waitpointId": waitpoint.pk, "kind": "CLARIFICATION", "answer": "blue"}
        first = done(public, "respond_to_waitpoint", **given)
        assert (first["status"], first["resolvedPayload"]["answer"]) == ("COMPLETED", "blue")
        assert done(public, "respond_to_waitpoint", **given | {"answer": "red"}) == first

    def test_only_an_answer_resolves_a_waitpoint(self, user, public):
        waitpoint = factories.WaitpointFactory(run__chat__user=user)
        Chat.objects.filter(pk=waitpoint.run.chat_id).update(active_run_id=waitpoint.run_id)
        foreign = factories.WaitpointFactory()
        wrong = [{}, {"kind": "CLARIFICATION"}, {"kind": "CLARIFICATION", "anwser": "x"}, {"answer": 1, "kind": "x"}]
        for answer in wrong:
            error = refused(public, "respond_to_waitpoint", waitpointId=waitpoint.pk, **answer)
            assert error["code"] == "VALIDATION_ERROR"
            assert refused(public, "respond_to_waitpoint", waitpointId=foreign.pk, **answer)["code"] == "NOT_FOUND"
        assert "waitpointId" in refused(public, "respond_to_waitpoint", kind="x")["details"]["fields"]
        given = {"waitpointId": waitpoint.pk, "kind": "CLARIFICATION", "answer": "blue"}
        first = done(public, "respond_to_waitpoint", **given)
        assert (first["status"], first["resolvedPayload"]["answer"]) == ("COMPLETED", "blue")
        for answer in wrong:
            assert done(public, "respond_to_waitpoint", waitpointId=waitpoint.pk, **answer) == first

    def test_run_without_credits_is_refused(self, user, public):
        fund(user, 0)
        chat = factories.ChatFactory(user=user)
        error = refused(public, "start_run", chatId=chat.pk, message="Hello")
        assert (error["code"], error["details"]) == ("INSUFFICIENT_CREDITS", {"available": "0", "topUpUrl": None})
