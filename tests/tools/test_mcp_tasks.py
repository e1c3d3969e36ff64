"""Tasks and questions of MCP servers, below the engine: what is sent, and what is made of the answers."""

import asyncio
import dataclasses
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from django.test import override_settings

from config.limits.share import Threads
from runs.tools import mcp
from runs.tools.base import Parked, ToolContext, ToolDefinition, ToolFailure, ToolResult
from runs.tools.dispatch import call_tool
from runs.tools.questions import REQUESTS_MAX, Dialogue
from tests.tools.conftest import http_tool
from tests.tools.task_server import (
    CAPABILITIES,
    EXTENSION,
    Refusal,
    TaskServer,
    asks,
    completed,
    form,
    task,
    task_server,
    text,
)


@pytest.fixture
def tasks() -> Iterator[TaskServer]:
    with task_server() as server:
        yield server


def tool(server: TaskServer, **columns: Any) -> ToolDefinition:
    return http_tool(server.url, **{"name": "research", "node_type": "mcp", "park_seconds": 3600, **columns})


def remote(dialogue: Dialogue | None = None, end_reason: str = "") -> ToolContext:
    dialogue = dialogue or Dialogue(task_id="t-1", interval=5.0)
    threads = Threads(1, 1, "tool")
    given = {"remote_task": dialogue.to_text(), "end_reason": end_reason}
    return ToolContext("inv_1", "run_1", "chat_1", 1, "ada", 20.0, threads, threads, **given)


def look(server: TaskServer, dialogue: Dialogue | None = None, **columns: Any) -> Any:
    """What a look at the task makes of the server's answer."""
    return asyncio.run(mcp.contact(tool(server, **columns), remote(dialogue)))


def failure(server: TaskServer, dialogue: Dialogue | None = None, **columns: Any) -> ToolFailure:
    with pytest.raises(ToolFailure) as caught:
        look(server, dialogue, **columns)
    return caught.value


def still(server: TaskServer, dialogue: Dialogue | None = None) -> tuple[Parked, Dialogue]:
    seen = look(server, dialogue)
    assert isinstance(seen, Parked)
    return seen, Dialogue.from_text(seen.remote_task)


class TestCalls:
    def test_a_task_parks_the_call(self, call, tasks):
        tasks.tool = lambda params: task("t-7", pollIntervalMs=2500, statusMessage="Begun") | {"resultType": "task"}
        parked = call(tool(tasks), {"topic": "bees"})
        assert isinstance(parked, Parked)
        assert (parked.message, parked.contact_in_seconds, parked.expires_in_seconds) == ("Begun", 2.5, None)
        assert Dialogue.from_text(parked.remote_task).task_id == "t-7"
        (sent,) = tasks.sent("tools/call")
        assert sent["arguments"] == {"topic": "bees"}
        assert sent["_meta"][CAPABILITIES] == {"elicitation": {"form": {}}, "extensions": {EXTENSION: {}}}

    def test_only_a_tool_that_may_park_declares_tasks(self, call, tasks):
        tasks.tool = lambda params: text("done")
        assert call(tool(tasks, park_seconds=None), {}).text == "done"
        assert tasks.sent("tools/call")[0]["_meta"][CAPABILITIES] == {"elicitation": {"form": {}}}

    def test_a_task_for_a_tool_that_may_not_park_is_an_error(self, call, tasks):
        with pytest.raises(ToolFailure, match="protocol"):
            call(tool(tasks, park_seconds=None), {})

    @pytest.mark.parametrize("task_id", ["", "x" * 1001, "a\x00b", 5])
    def test_a_task_without_a_usable_id_is_an_error(self, call, tasks, task_id):
        tasks.tool = lambda params: task(task_id) | {"resultType": "task"}
        with pytest.raises(ToolFailure, match=r"id|protocol"):
            call(tool(tasks), {})

    def test_a_form_is_asked_and_the_call_made_again(self, call, context, tasks):
        def answer(params: dict[str, Any]) -> Any:
            given = params.get("inputResponses")
            return text(f"Hello {given['who']['content']['name']}") if given else asks("s:1", who=form("Who are you?"))

        tasks.tool = answer
        asked = call(tool(tasks, park_seconds=None), {"n": 1})
        assert isinstance(asked, Parked)
        assert asked.asks_user
        dialogue = Dialogue.from_text(asked.remote_task)
        assert dialogue.question is not None
        assert (dialogue.question.text, dialogue.question.schema["required"]) == ("Who are you?", ["name"])
        again = dataclasses.replace(context, remote_task=dialogue.with_answer({"name": "Ada"}).to_text())
        assert call(tool(tasks), {"n": 1}, again).text == "Hello Ada"
        last = tasks.sent("tools/call")[-1]
        assert last["arguments"] == {"n": 1}
        assert last["requestState"] == "s:1"
        assert last["inputResponses"] == {"who": {"action": "accept", "content": {"name": "Ada"}}}

    def test_anything_else_is_declined_at_once(self, call, tasks):
        url = {"method": "elicitation/create", "params": {"mode": "url", "message": "Pay", "url": "https://x.example"}}
        sampling = {"method": "sampling/createMessage", "params": {"messages": [], "maxTokens": 5}}
        roots = {"method": "roots/list"}

        def answer(params: dict[str, Any]) -> Any:
            if "inputResponses" not in params:
                return asks("s", pay=url, think=sampling, files=roots)
            return text("without")

        tasks.tool = answer
        assert call(tool(tasks), {}).text == "without"
        declined = {"action": "decline"}
        assert tasks.sent("tools/call")[-1]["inputResponses"] == dict.fromkeys(("pay", "think", "files"), declined)

    def test_a_server_that_asks_to_be_asked_again_is_asked_a_few_times(self, call, tasks):
        answers = iter([asks("1"), asks("2"), text("now")])
        tasks.tool = lambda params: next(answers)
        assert call(tool(tasks), {}).text == "now"
        assert [params.get("requestState") for params in tasks.sent("tools/call")] == [None, "1", "2"]

    @pytest.mark.parametrize("requests", [{}, {"pay": {"method": "roots/list"}}], ids=["state", "declined"])
    def test_one_that_never_ends_is_an_error(self, call, tasks, requests, monkeypatch):
        monkeypatch.setattr("runs.tools.mcp.client.ROUND_SECONDS", 0.0)
        tasks.tool = lambda params: asks("again", **requests)
        with pytest.raises(ToolFailure, match="again and again"):
            call(tool(tasks), {})
        assert len(tasks.sent("tools/call")) == 10

    def test_a_question_does_not_wait_for_the_users_other_calls(self, context, tasks):
        tasks.tool = lambda params: asks("s", who=form("Who are you?"))
        release = threading.Event()

        async def run() -> Any:
            busy = [asyncio.create_task(context.threads.run(context.user_id, release.wait)) for _ in range(2)]
            try:
                return await call_tool(tool(tasks), {}, context)
            finally:
                release.set()
                await asyncio.gather(*busy)

        assert asyncio.run(run()).asks_user

    def test_too_many_requests_are_an_error(self, call, tasks):
        tasks.tool = lambda params: asks(**{f"k{number}": form("?") for number in range(REQUESTS_MAX + 1)})
        with pytest.raises(ToolFailure, match=f"more than {REQUESTS_MAX}"):
            call(tool(tasks), {})


class TestLooks:
    def test_progress_and_interval(self, tasks):
        tasks.task = lambda params: task("t-1", statusMessage="half", pollIntervalMs=7000)
        seen, dialogue = still(tasks)
        assert (seen.message, seen.contact_in_seconds, dialogue.interval) == ("half", 7.0, 7.0)

    @pytest.mark.parametrize(
        ("given", "seconds"),
        [(0, 1.0), (-5, 1.0), (1, 1.0), (10**12, 300.0), (1e308, 300.0), ("5000", 10.0), (True, 10.0), (None, 10.0)],
    )
    def test_the_interval_is_kept_within_bounds(self, tasks, given, seconds):
        tasks.task = lambda params: task("t-1", pollIntervalMs=given)
        assert still(tasks)[0].contact_in_seconds == seconds

    def test_without_an_interval_it_grows_to_a_minute(self, tasks):
        dialogue = Dialogue(task_id="t-1", interval=5.0)
        found = []
        for _ in range(6):
            seen, dialogue = still(tasks, dialogue)
            found.append(seen.contact_in_seconds)
        assert found == [10, 20, 40, 60, 60, 60]

    def test_without_an_interval_it_is_five_seconds_at_least(self, tasks):
        """Also if the server gave a shorter one before."""
        assert still(tasks, Dialogue(task_id="t-1", interval=1.0))[0].contact_in_seconds == 5

    @pytest.mark.parametrize("as_events", [False, True])
    def test_the_result(self, tasks, as_events):
        tasks.as_events = as_events
        tasks.task = lambda params: completed("t-1", "All about bees")
        assert look(tasks) == ToolResult("All about bees")

    def test_a_result_that_is_an_error_of_the_tool(self, tasks):
        tasks.task = lambda params: task("t-1", "completed", result=text("no paper", isError=True))
        error = failure(tasks)
        assert (error.code, error.message) == ("TOOL_ERROR", "no paper")

    def test_a_failed_and_a_cancelled_task(self, tasks):
        secret = {"X-Api-Key": "0123456789ab"}
        tasks.task = lambda params: task("t-1", "failed", error={"code": -32603, "message": "quota of 0123456789ab"})
        error = failure(tasks, secret_headers=secret)
        assert (error.code, error.message) == ("TOOL_ERROR", "research failed: quota of [key]")
        tasks.task = lambda params: task("t-1", "cancelled")
        error = failure(tasks)
        assert (error.code, error.message) == ("TOOL_ERROR", "research was cancelled by its server.")

    def test_an_unknown_task(self, tasks):
        def unknown(params: dict[str, Any]) -> Any:
            raise Refusal(-32602, "Task not found")

        tasks.task = unknown
        assert failure(tasks).code == "OUTCOME_UNKNOWN"

    @pytest.mark.parametrize(
        "answer",
        [
            b"",
            b"{",
            b"[]",
            b"[" * 15_000,
            b"<html>",
            b'{"jsonrpc": "2.0", "id": 9, "result": {"taskId": "t-1", "status": "completed"}}',
            task("t-2", "completed", result=text("of another task")),
            task("t-1", "done"),
            {"resultType": "complete"},
            [],
        ],
        ids=str,
    )
    def test_an_answer_that_says_nothing_of_the_task(self, tasks, answer):
        tasks.task = lambda params: answer
        assert still(tasks)[0].contact_in_seconds == 10

    @pytest.mark.parametrize("status", [401, 404, 429, 500, 502])
    def test_a_server_that_is_away(self, tasks, status):
        tasks.status = status
        dialogue = Dialogue(task_id="t-1", interval=1.0)
        found = []
        for _ in range(5):
            seen, dialogue = still(tasks, dialogue)
            found.append(seen.contact_in_seconds)
        assert found == [5, 10, 20, 40, 60]

    def test_the_log_has_nothing_that_a_server_says_in_place_of_a_code(self, tasks, caplog):
        tasks.task = lambda params: b'{"jsonrpc":"2.0","id":1,"error":{"code":"Bearer hunter22","message":"no"}}'
        with caplog.at_level("INFO"):
            still(tasks)
        assert "is away" in caplog.text
        assert "hunter22" not in caplog.text

    def test_a_server_that_is_gone(self, tasks):
        dialogue = Dialogue(task_id="t-1", interval=300.0)
        definition = dataclasses.replace(tool(tasks), url="http://127.0.0.1:9/mcp")
        seen = asyncio.run(mcp.contact(definition, remote(dialogue)))
        assert seen.contact_in_seconds == 300, "no more often than its server wants"

    def test_other_errors_of_the_protocol(self, tasks):
        def broken(params: dict[str, Any]) -> Any:
            raise Refusal(-32603)

        tasks.task = broken
        assert still(tasks)[0].contact_in_seconds == 10

    def test_a_result_that_is_none(self, tasks):
        for result in (None, 5, {"content": 7}, {}):
            tasks.task = lambda params, result=result: task("t-1", "completed", result=result)
            assert failure(tasks).message == "research broke the MCP protocol."

    def test_a_giant_message_is_cut(self, tasks):
        tasks.task = lambda params: task("t-1", statusMessage="\x00" + "x" * 500_000)
        assert len(still(tasks)[0].message) == 300

    def test_an_answer_that_is_too_large(self, tasks):
        with override_settings(TOOL_ANSWER_MAX_BYTES=10_000):
            tasks.task = lambda params: completed("t-1", "x" * 20_000)
            assert "10000 bytes" in failure(tasks).message
        tasks.task = lambda params: task("t-1", extra=[0] * 200_000)
        begun = time.process_time()
        assert "values" in failure(tasks).message
        assert time.process_time() - begun < 5

    def test_the_cancel(self, tasks):
        for status in (None, 500):
            tasks.status = status
            assert asyncio.run(mcp.contact(tool(tasks), remote(end_reason="expired"))) is None
        assert [params["taskId"] for params in tasks.sent("tasks/cancel")] == ["t-1", "t-1"]
        assert not tasks.sent("tasks/get")

    def test_an_id_that_no_header_holds(self, tasks):
        tasks.task = lambda params: completed(params["taskId"], "found")
        tasks_check = Dialogue(task_id="ärger 1", interval=1.0)
        assert isinstance(look(tasks, tasks_check), Parked), "the server here compares the header as it is"
        assert tasks.headers[-1]["Mcp-Name"].startswith("=?base64?")


class TestQuestions:
    def test_a_form_of_a_task(self, tasks):
        requests = {"name": form("Who?"), "pay": form("Pay", mode="url")}
        tasks.task = lambda params: task("t-1", "input_required", inputRequests=requests, pollIntervalMs=3000)
        seen, dialogue = still(tasks)
        assert seen.contact_in_seconds is None, "not asked again before the user has answered"
        assert [question.key for question in dialogue.questions] == ["name"]
        (declined,) = tasks.sent("tasks/update")
        assert declined["inputResponses"] == {"pay": {"action": "decline"}}
        # The user answers. The server still shows the request.
        dialogue = dialogue.with_answer({"name": "Ada"})
        seen, dialogue = still(tasks, dialogue)
        assert tasks.sent("tasks/update")[-1]["inputResponses"] == {
            "name": {"action": "accept", "content": {"name": "Ada"}}
        }
        assert (seen.contact_in_seconds, dialogue.questions, dialogue.answers) == (3.0, (), {})
        seen, dialogue = still(tasks, dialogue)
        assert len(tasks.sent("tasks/update")) == 2
        assert dialogue.questions == ()

    def test_answers_are_kept_while_the_server_is_away(self, tasks):
        dialogue = Dialogue(task_id="t-1", interval=1.0).with_requests({"a": form("A?")}).with_answer(None)
        tasks.status = 503
        _, dialogue = still(tasks, dialogue)
        assert dialogue.answers == {"a": {"action": "decline"}}
        tasks.status = None
        _, dialogue = still(tasks, dialogue)
        assert dialogue.answers == {}

    def test_digits_of_an_answer(self, tasks):
        from config.kernel.jsontext import from_text

        data = from_text('{"n":12345678901234567890123,"d":0.12345678901234567890123}')
        dialogue = Dialogue(task_id="t-1", interval=1.0).with_requests({"a": form("A?")}).with_answer(data)
        bodies: list[str] = []
        still(tasks, Dialogue.from_text(dialogue.to_text()))
        bodies.append(json.dumps(tasks.sent("tasks/update")[0]["inputResponses"]["a"]["content"]["n"]))
        assert bodies == ["12345678901234567890123"]

    @pytest.mark.parametrize(
        "request_of",
        [
            None,
            [],
            {},
            {"method": "elicitation/create"},
            {"method": "elicitation/create", "params": {"message": "?"}},
            form(""),
            form("?", {"type": "array"}),
            form("?", {"type": "object", "properties": {"a": {"pattern": "(x"}}}),
            form("?", {"type": "object", "patternProperties": {"(?=x)": {}}}),
            form("?", {"type": "object", "properties": {"a": {"pattern": "(a+){500}{500}"}}}),
            form("?", {"type": "object", "properties": {"a": {"$ref": "https://evil.example/schema"}}}),
            form("?", {"type": "object", "description": "x" * 17_000}),
            form("?", json.loads('{"a":' * 100 + "1" + "}" * 100)),
            form("?", {"type": "object", "properties": {"a\ud800": {}}}),
            form("?", {"type": "object", "default": float("nan")}),
            form("?", mode="shout"),
        ],
        ids=lambda value: str(value)[:40],
    )
    def test_what_is_no_form_is_declined(self, request_of):
        dialogue = Dialogue(task_id="t-1").with_requests({"a": request_of})
        assert (dialogue.questions, dialogue.answers) == ((), {"a": {"action": "decline"}})

    def test_a_schema_that_takes_long_is_declined(self):
        """Each definition refers twice to the next one."""
        levels = 60
        definitions: dict[str, Any] = {
            f"d{level}": {"allOf": [{"$ref": f"#/$defs/d{level + 1}"}] * 2} for level in range(levels)
        } | {f"d{levels}": {"type": "string"}}
        schema = {"type": "object", "$defs": definitions, "additionalProperties": {"$ref": "#/$defs/d0"}}
        begun = time.monotonic()
        dialogue = Dialogue(task_id="t-1").with_requests({"a": form("?", schema)})
        assert time.monotonic() - begun < 10
        assert dialogue.requests == 1

    def test_requests_are_counted_over_the_call(self):
        dialogue = Dialogue(task_id="t-1")
        for number in range(REQUESTS_MAX):
            dialogue = dialogue.with_requests({f"k{number}": form("?")}).with_answer({}).when_told()
        with pytest.raises(ToolFailure, match="more than"):
            dialogue.with_requests({"one more": form("?")})

    @pytest.mark.parametrize("key", ["k" * 201, "a\x00"])
    def test_a_name_that_cannot_be_used(self, key):
        with pytest.raises(ToolFailure, match="name"):
            Dialogue().with_requests({key: form("?")})
