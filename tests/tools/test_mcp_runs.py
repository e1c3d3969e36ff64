"""Runs whose calls are tasks of MCP servers, or whose servers ask the user."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from cryptography.fernet import Fernet

from config.kernel import clock
from credits import ledger
from runs import catalogue, lifecycle, privacy
from runs.engine.engine import hand_over_all
from runs.models import Run, Tool, ToolInvocation, Waitpoint
from runs.tools.mcp.tasks import TASK_REQUEST_SECONDS
from tests.driver import Driver, InProcess, until
from tests.factories import UserFactory, session_client
from tests.lifecycle import conftest as engine_fixtures
from tests.lifecycle.conftest import vanish
from tests.tools.task_server import CAPABILITIES, Refusal, TaskServer, asks, completed, form, task, task_server, text

engines = engine_fixtures.engines
bench = engine_fixtures.bench
events = engine_fixtures.events

SCRIPT = "/call research {}\n/say It is {result}."


@pytest.fixture
def tasks() -> Iterator[TaskServer]:
    with task_server() as server:
        yield server


def add_tool(server: TaskServer, name: str = "research", **columns: Any) -> Tool:
    columns = {"price": 2_000_000, "park_seconds": 600, "remote_name": "research"} | columns
    tool = Tool.objects.create(name=name, display_name=name, node_type="mcp", url=server.url, **columns)
    catalogue.forget()
    catalogue.refresh()
    return tool


def park(bench: Any, message: str = SCRIPT, **body: Any) -> dict[str, Any]:
    run = bench.start(message, **body)
    until(lambda: Run.objects.filter(pk=run["id"], parked=True).exists(), describe=lambda: bench.get(run["id"]))
    return bench.get(run["id"])


def parked_for_long(params: dict[str, Any]) -> Any:
    """No call is asked for before the test says so: one that is asked for twice at once would have one place."""
    return task("t-1", pollIntervalMs=60_000) | {"resultType": "task"}


def hanging(answer: Any) -> tuple[Callable[[dict[str, Any]], Any], threading.Event, threading.Event]:
    """A handler that gives the answer late. It sets the first event when it is asked, and waits for the second one."""
    asked, over = threading.Event(), threading.Event()

    def hang(params: dict[str, Any]) -> Any:
        asked.set()
        over.wait(30)
        return answer

    return hang, asked, over


def look(bench: Any, server: TaskServer) -> None:
    """Have the servers of all calls that may be asked for asked now, and wait until their answers are recorded."""
    before = dict(ToolInvocation.objects.filter(contact_at__isnull=False).values_list("pk", "contacts"))
    assert before
    asked = len(server.requests)
    ToolInvocation.objects.filter(pk__in=before).update(contact_at=clock.now())

    def was_asked() -> bool:
        rows = ToolInvocation.objects.filter(pk__in=before).values_list("pk", "contacts")
        # A call is taken a moment before its request is a task of the engine.
        is_asked = len(server.requests) >= asked + len(before) and all(contacts > before[pk] for pk, contacts in rows)
        return is_asked and not bench.engine.contacts.tasks

    until(was_asked)


def test_a_task_is_asked_for_until_it_has_completed(bench, tasks, events, monkeypatch):
    monkeypatch.setattr("runs.lifecycle.calls.PROGRESS_SECONDS", 0)
    add_tool(tasks)
    tasks.tool = lambda params: task("t-1", pollIntervalMs=60_000, statusMessage="Begun") | {"resultType": "task"}
    run = park(bench)
    (call,) = run["toolInvocations"]
    assert (run["status"], run["awaiting"], call["status"], call["awaiting"]) == (
        *("running", "tool"),
        *("DISPATCHING", "tool"),
    )
    assert (call["progress"]["fraction"], call["progress"]["message"]) == (None, "Begun")
    row: Any = ToolInvocation.objects.get()
    assert timedelta(seconds=600) <= row.expires_at - row.started_at < timedelta(seconds=660)
    assert bench.credits()["held"] == "2"
    until(lambda: not bench.engine.tasks)
    tasks.task = lambda params: task("t-1", statusMessage="x" * 5000, pollIntervalMs=10**15)
    look(bench, tasks)
    row = ToolInvocation.objects.get()
    assert row.contact_at <= clock.now() + timedelta(minutes=5)
    assert len(bench.get(run["id"])["toolInvocations"][0]["progress"]["message"]) == 300
    look(bench, tasks)
    tasks.task = lambda params: completed("t-1", "all about bees")
    look(bench, tasks)
    run = bench.wait(run["id"])
    assert run["answer"] == "It is all about bees."
    (call,) = run["toolInvocations"]
    assert (call["status"], call["creditUsed"], call["awaiting"], call["progress"]) == ("COMPLETED", 2, None, None)
    assert bench.credits()["held"] == "0"
    row = ToolInvocation.objects.get()
    assert (row.contact_at, row.remote_task) == (None, "")
    happened = events(run["id"])
    kinds = [kind for kind, _ in happened if kind.startswith("tool.")]
    assert kinds == ["tool.started", "tool.parked", "tool.progress", "tool.progress", "tool.completed"]
    assert [data["status"] for kind, data in happened if kind == "run.status"] == ["queued", "running", "completed"]
    assert not tasks.sent("tasks/cancel")
    assert list(lifecycle.violations()) == []


def test_a_task_is_asked_for_again_however_many_workers_die_while_they_ask(bench, tasks, engines):
    add_tool(tasks)
    tasks.tool = parked_for_long
    run = park(bench)
    vanish(bench.engine)
    calls = ToolInvocation.objects.filter(run=run["id"])
    for _ in range(4):
        calls.update(contact_at=clock.now())
        assert len(lifecycle.take_contacts([call.pk for call in calls])) == 1
        assert clock.now() < calls.get().contact_at <= clock.now() + timedelta(seconds=60)
    tasks.task = lambda params: completed("t-1", "all about bees")
    calls.update(contact_at=clock.now())
    engines()
    assert bench.wait(run["id"])["answer"] == "It is all about bees."


@pytest.mark.parametrize("interval", [10**400, float("nan")], ids=["huge", "NaN"])
def test_an_interval_that_is_no_time_ends_no_task(bench, tasks, interval):
    add_tool(tasks)
    tasks.tool = lambda params: task("t-1", pollIntervalMs=interval) | {"resultType": "task"}
    tasks.task = lambda params: task("t-1", statusMessage="Half done", pollIntervalMs=interval)
    run = park(bench)
    look(bench, tasks)
    row = ToolInvocation.objects.get()
    assert row.contact_at < clock.now() + timedelta(minutes=5)
    assert row.progress["message"] == "Half done"
    tasks.task = lambda params: completed("t-1", "all about bees")
    look(bench, tasks)
    assert bench.wait(run["id"])["answer"] == "It is all about bees."


@pytest.mark.parametrize(
    ("answer", "code", "told"),
    [
        (task("t-1", "failed", error={"code": -1, "message": "no paper"}), "TOOL_ERROR", "research failed: no paper"),
        (task("t-1", "cancelled"), "TOOL_ERROR", "research was cancelled by its server."),
        (None, "OUTCOME_UNKNOWN", "The server of research does not know the call's task any more."),
    ],
    ids=["failed", "cancelled", "unknown"],
)
def test_a_task_that_ends_otherwise_costs_nothing(bench, tasks, answer, code, told):
    add_tool(tasks)

    def seen(params: dict[str, Any]) -> Any:
        if answer is None:
            raise Refusal(-32602)
        return answer

    tasks.task = seen
    run = park(bench)
    look(bench, tasks)
    run = bench.wait(run["id"])
    (call,) = run["toolInvocations"]
    assert (call["status"], call["errorCode"], call["errorMessage"], call["creditUsed"]) == ("FAILED", code, told, 0)
    assert (run["status"], run["answer"]) == ("completed", f"It is {code}: {told}.")
    assert bench.credits()["held"] == "0"
    assert list(lifecycle.violations()) == []


@pytest.mark.parametrize("end", ["cancelled", "expired", "deleted"])
def test_a_task_whose_outcome_is_not_wanted_is_cancelled_once(bench, tasks, end):
    add_tool(tasks)
    run = park(bench)
    tasks.status = 500 if end == "cancelled" else None
    if end == "cancelled":
        bench.cancel(run["id"])
    elif end == "deleted":
        bench.client.delete(f"/api/v1/chats/{run['chatId']}")
    else:
        ToolInvocation.objects.update(expires_at=clock.now())
    until(lambda: tasks.sent("tasks/cancel"))
    until(lambda: ToolInvocation.objects.get().contact_at is None)
    assert [params["taskId"] for params in tasks.sent("tasks/cancel")] == ["t-1"]
    call = ToolInvocation.objects.get()
    assert (call.status, call.error_code) == ("FAILED", "TOOL_TIMEOUT" if end == "expired" else "OUTCOME_UNKNOWN")
    if end == "expired":
        run = bench.wait(run["id"])
        assert run["answer"].startswith("It is TOOL_TIMEOUT: ")
    assert bench.credits()["held"] == "0"
    assert len(tasks.sent("tasks/cancel")) == 1
    assert list(lifecycle.violations()) == []


def test_a_server_that_is_away_is_asked_until_the_calls_end(bench, tasks):
    add_tool(tasks)
    run = park(bench)
    tasks.status = 503
    for _ in range(4):
        look(bench, tasks)
    assert bench.get(run["id"])["toolInvocations"][0]["status"] == "DISPATCHING"
    tasks.status = None
    tasks.task = lambda params: completed("t-1", "late")
    look(bench, tasks)
    assert bench.wait(run["id"])["answer"] == "It is late."


def test_a_redirect_to_the_same_server_is_followed_for_tasks_too(bench, tasks):
    tasks.path = "/mcp/"
    add_tool(tasks)
    run = park(bench)
    tasks.task = lambda params: completed("t-1", "here")
    look(bench, tasks)
    assert bench.wait(run["id"])["answer"] == "It is here."


def test_a_task_of_a_tool_that_is_disabled_meanwhile_goes_on(bench, tasks):
    tool = add_tool(tasks)
    run = park(bench)
    Tool.objects.filter(pk=tool.pk).update(enabled=False)
    catalogue.forget()
    tasks.task = lambda params: completed("t-1", "still here")
    look(bench, tasks)
    assert bench.wait(run["id"])["answer"] == "It is still here."


def test_a_secret_that_no_key_decrypts_stops_no_other_task(bench, tasks, settings):
    lost = add_tool(tasks, "lost")
    add_tool(tasks)
    runs = [park(bench, f"/call {name} {{}}\n/say It is {{result}}.") for name in ("lost", "research")]
    keys, settings.ENCRYPTION_KEYS = settings.ENCRYPTION_KEYS, [Fernet.generate_key().decode()]
    Tool.objects.filter(pk=lost.pk).update(secret_headers='{"Authorization": "Bearer abcdef"}')
    settings.ENCRYPTION_KEYS = keys
    tasks.task = lambda params: completed("t-1", "found")
    ToolInvocation.objects.update(contact_at=clock.now())
    assert bench.wait(runs[1]["id"])["answer"] == "It is found."
    (call,) = bench.get(runs[0]["id"])["toolInvocations"]
    assert call["awaiting"] == "tool"


def test_a_call_is_parked_only_if_its_tool_might_be_when_it_was_chosen(bench, tasks):
    """Staff give the tool its seconds while the call waits for an approval."""
    tool = add_tool(tasks, approval="always", park_seconds=None)
    run = bench.ask(SCRIPT)
    Tool.objects.filter(pk=tool.pk).update(park_seconds=600)
    catalogue.forget()
    catalogue.refresh()

    def answer(params: dict[str, Any]) -> Any:
        is_asked = "extensions" in params["_meta"][CAPABILITIES]
        return task("t-1") | {"resultType": "task"} if is_asked else text("done")

    tasks.tool = answer
    bench.respond(run, kind="CREDIT_APPROVAL", approved=True)
    assert bench.wait(run["id"])["answer"] == "It is done."


def answered(run: dict[str, Any]) -> dict[str, Any]:
    return run["pendingWaitpoint"]["requestPayload"]


class TestQuestionsOfTasks:
    def test_each_is_asked_and_answered(self, bench, tasks, events):
        add_tool(tasks)
        run = park(bench)
        call_id = run["toolInvocations"][0]["id"]
        requests = {"name": form("Who are you?"), "pay": form("Pay", mode="url"), "age": form("How old?")}
        tasks.task = lambda params: task("t-1", "input_required", inputRequests=requests)
        look(bench, tasks)
        run = bench.wait(run["id"], "waiting")
        assert (run["awaiting"], run["pendingWaitpoint"]["kind"]) == ("tool", "CLARIFICATION")
        schema = form("")["params"]["requestedSchema"]
        assert answered(run) == {"question": "Who are you?", "toolInvocationId": call_id, "schema": schema}
        assert tasks.sent("tasks/update")[0]["inputResponses"] == {"pay": {"action": "decline"}}
        assert ToolInvocation.objects.get().contact_at is None
        given = bench.respond(run, kind="CLARIFICATION", data={"name": "Ada"})
        assert given["resolvedPayload"].items() >= {"data": {"name": "Ada"}}.items()
        run = bench.wait(run["id"], "waiting")
        assert answered(run)["question"] == "How old?"
        tasks.task = lambda params: task("t-1", "input_required", inputRequests=requests)
        given = bench.respond(run, kind="CLARIFICATION", declined=True)
        assert given["resolvedPayload"]["declined"] is True
        until(lambda: len(tasks.sent("tasks/update")) == 2)
        assert tasks.sent("tasks/update")[1]["inputResponses"] == {
            "name": {"action": "accept", "content": {"name": "Ada"}},
            "age": {"action": "decline"},
        }
        until(lambda: Run.objects.get().parked)
        look(bench, tasks)
        tasks.task = lambda params: completed("t-1", "Hello Ada")
        look(bench, tasks)
        run = bench.wait(run["id"])
        assert run["answer"] == "It is Hello Ada."
        assert Waitpoint.objects.filter(status="COMPLETED").count() == 2
        happened = [data["status"] for kind, data in events(run["id"]) if kind == "run.status"]
        assert happened == ["queued", "running", *("waiting", "queued", "running") * 2, "completed"]
        assert list(lifecycle.violations()) == []

    def test_a_pattern_that_cannot_be_matched_is_left_to_the_server(self, bench, tasks):
        add_tool(tasks)
        run = park(bench)
        email = {"type": "string", "format": "email"}
        schema = {"type": "object", "properties": {"email": email | {"pattern": r"^(?!\.)[^@]+@[^@]+$"}}}
        tasks.task = lambda params: task("t-1", "input_required", inputRequests={"email": form("Where?", schema)})
        look(bench, tasks)
        run = bench.wait(run["id"], "waiting")
        assert answered(run)["schema"] == {"type": "object", "properties": {"email": email}}

    def test_the_call_ends_before_the_answer(self, bench, tasks, events):
        add_tool(tasks)
        run = park(bench)
        tasks.task = lambda params: task("t-1", "input_required", inputRequests={"name": form("Who?")})
        look(bench, tasks)
        waiting = bench.wait(run["id"], "waiting")
        ToolInvocation.objects.update(expires_at=clock.now())
        run = bench.wait(run["id"])
        assert (run["status"], run["toolInvocations"][0]["errorCode"]) == ("completed", "TOOL_TIMEOUT")
        assert Waitpoint.objects.get().status == "EXPIRED"
        until(lambda: tasks.sent("tasks/cancel"))
        late = bench.respond(waiting, kind="CLARIFICATION", data={"name": "Ada"})
        assert late["status"] == "EXPIRED"
        events(run["id"])
        assert list(lifecycle.violations()) == []

    def test_a_cancel_before_the_answer(self, bench, tasks):
        add_tool(tasks)
        run = park(bench)
        tasks.task = lambda params: task("t-1", "input_required", inputRequests={"name": form("Who?")})
        look(bench, tasks)
        bench.wait(run["id"], "waiting")
        assert bench.cancel(run["id"])["status"] == "cancelled"
        until(lambda: tasks.sent("tasks/cancel"))
        assert list(lifecycle.violations()) == []

    def test_another_call_of_the_turn_is_approved_first(self, bench, tasks):
        add_tool(tasks)
        run = bench.ask('/call research {}\n/call draw_chart {"title": "A", "series": [1]}\n/say done {result}')
        assert run["pendingWaitpoint"]["kind"] == "CREDIT_APPROVAL"
        tasks.task = lambda params: task("t-1", "input_required", inputRequests={"name": form("Who?")})
        look(bench, tasks)
        assert bench.get(run["id"])["pendingWaitpoint"]["kind"] == "CREDIT_APPROVAL"
        bench.respond(run, kind="CREDIT_APPROVAL", approved=False)
        until(lambda: (bench.get(run["id"])["pendingWaitpoint"] or {}).get("kind") == "CLARIFICATION")
        run = bench.get(run["id"])
        tasks.task = lambda params: completed("t-1", "Hello")
        bench.respond(run, kind="CLARIFICATION", data={"name": "Ada"})
        assert bench.wait(run["id"])["status"] == "completed"
        assert list(lifecycle.violations()) == []


class TestQuestionsOfCalls:
    @staticmethod
    def greet(params: dict[str, Any]) -> Any:
        given = params.get("inputResponses", {}).get("who")
        if given is None:
            return asks("first", who=form("Who?"))
        return text(f"Hello {given['content']['name']}" if given["action"] == "accept" else "Hello nobody")

    def greet_by_task(self, params: dict[str, Any]) -> Any:
        is_answered = "inputResponses" in params
        return task("t-9", pollIntervalMs=1000) | {"resultType": "task"} if is_answered else self.greet(params)

    def test_the_call_is_made_again_with_the_answer(self, bench, tasks, events):
        add_tool(tasks, park_seconds=None)
        tasks.tool = self.greet
        run = bench.ask(SCRIPT)
        (call,) = run["toolInvocations"]
        assert (run["awaiting"], call["status"], call["awaiting"]) == (None, "DISPATCHING", None)
        assert answered(run)["question"] == "Who?"
        assert bench.credits()["held"] == "2"
        assert list(lifecycle.violations()) == []
        bench.respond(run, kind="CLARIFICATION", data={"name": "Ada"})
        run = bench.wait(run["id"])
        assert run["answer"] == "It is Hello Ada."
        assert run["toolInvocations"][0]["creditUsed"] == 2
        assert tasks.sent("tools/call")[1]["requestState"] == "first"
        kinds = [kind for kind, _ in events(run["id"]) if kind.startswith("tool.")]
        assert kinds == ["tool.started", "tool.completed"]
        assert list(lifecycle.violations()) == []

    def test_another_call_does_not_wait_for_credits_that_the_question_keeps(self, bench, tasks, user):
        """The question is asked when the other calls of its turn have ended."""
        add_tool(tasks, price=6_000_000, park_seconds=None)
        tasks.tool = self.greet
        change = 9_000_000 - ledger.account_for(user.pk).available
        ledger.adjust(user.pk, change, reason="for the test", staff=UserFactory(is_staff=True))
        run = bench.wait(bench.start("/call research {}\n/call research {}\n/say done")["id"], "waiting", timeout=20)
        assert [call["errorCode"] for call in run["toolInvocations"]] == [None, "INSUFFICIENT_CREDITS"]
        bench.respond(run, kind="CLARIFICATION", data={"name": "Ada"})
        run = bench.wait(run["id"])
        assert (run["status"], run["toolInvocations"][0]["creditUsed"]) == ("completed", 6)
        assert list(lifecycle.violations()) == []

    def test_one_that_becomes_a_task_which_asks_too(self, bench, tasks):
        add_tool(tasks)
        tasks.tool = self.greet_by_task
        tasks.task = lambda params: task("t-9", "input_required", inputRequests={"color": form("Which color?")})
        run = bench.ask(SCRIPT)
        assert answered(run)["question"] == "Who?"
        bench.respond(run, kind="CLARIFICATION", data={"name": "Ada"})
        until(
            lambda: (
                (bench.get(run["id"])["pendingWaitpoint"] or {}).get("id") not in (None, run["pendingWaitpoint"]["id"])
            )
        )
        run = bench.get(run["id"])
        assert run["pendingWaitpoint"]["requestPayload"]["question"] == "Which color?"
        tasks.task = lambda params: completed("t-9", "a blue task")
        bench.respond(run, kind="CLARIFICATION", data={"name": "blue"})
        assert bench.wait(run["id"])["answer"] == "It is a blue task."
        assert tasks.sent("tasks/update")[0]["inputResponses"]["color"]["content"] == {"name": "blue"}
        assert list(lifecycle.violations()) == []

    def test_one_that_becomes_a_task(self, bench, tasks):
        add_tool(tasks)
        tasks.tool = self.greet_by_task
        tasks.task = lambda params: completed("t-9", "a task after all")
        run = bench.ask(SCRIPT)
        bench.respond(run, kind="CLARIFICATION", declined=True)
        until(lambda: Run.objects.get().parked)
        look(bench, tasks)
        assert bench.wait(run["id"])["answer"] == "It is a task after all."
        assert list(lifecycle.violations()) == []

    @pytest.mark.parametrize("repeatable", [False, True])
    def test_the_worker_is_lost(self, bench, engines, tasks, repeatable):
        """Before the answer it costs nothing; while the call is made again, the outcome is unknown."""
        add_tool(tasks, park_seconds=None, repeatable=repeatable)
        tasks.tool = self.greet
        run = bench.ask(SCRIPT)
        vanish(bench.engine)
        bench.engine = engines()
        tasks.tool, asked, over = hanging(text("too late"))
        bench.respond(run, kind="CLARIFICATION", data={"name": "Ada"})
        assert asked.wait(20)
        vanish(bench.engine)
        tasks.tool = self.greet
        bench.engine = engines()
        run = bench.wait(run["id"])
        over.set()
        (call,) = run["toolInvocations"]
        if repeatable:
            assert run["answer"] == "It is Hello Ada."
        else:
            assert (call["status"], call["errorCode"]) == ("FAILED", "OUTCOME_UNKNOWN")
        assert bench.credits()["held"] == "0"
        assert list(lifecycle.violations()) == []


def test_no_worker_is_needed_between_the_looks(bench, engines, tasks):
    """Every worker is killed with the task, its question and its answer; the calls go on."""
    add_tool(tasks)
    run = park(bench)
    vanish(bench.engine)
    tasks.task = lambda params: task("t-1", "input_required", inputRequests={"name": form("Who?")})
    bench.engine = engines()
    look(bench, tasks)
    run = bench.wait(run["id"], "waiting")
    vanish(bench.engine)
    tasks.task = lambda params: completed("t-1", "Hello")
    bench.respond(run, kind="CLARIFICATION", data={"name": "Ada"})
    bench.engine = engines()
    run = bench.wait(run["id"])
    assert run["answer"] == "It is Hello."
    assert tasks.sent("tasks/update")[0]["inputResponses"]["name"]["content"] == {"name": "Ada"}
    assert list(lifecycle.violations()) == []


def test_the_worker_is_lost_before_it_knows_the_task(bench, engines, tasks):
    add_tool(tasks)
    tasks.tool, asked, over = hanging(text("too late"))
    run = bench.start(SCRIPT)
    assert asked.wait(20)
    vanish(bench.engine)
    bench.engine = engines()
    (call,) = bench.wait(run["id"])["toolInvocations"]
    over.set()
    assert (call["status"], call["errorCode"]) == ("FAILED", "OUTCOME_UNKNOWN")


def test_a_slow_server_delays_no_other(bench, tasks, monkeypatch):
    """It has all of its places taken, and more of its calls are due."""
    monkeypatch.setattr("runs.engine.contacts.CONTACTS_PER_SERVER", 2)
    monkeypatch.setattr("runs.engine.contacts.CONTACTS_MAX", 3)
    release = threading.Event()
    with task_server() as slow:
        add_tool(slow, "sloth")
        add_tool(tasks)
        ended = list[bool]()

        def hang(params: dict[str, Any]) -> Any:
            ended.append(release.wait(TASK_REQUEST_SECONDS - 1))
            return task("t-1")

        slow.tool = parked_for_long
        slow.task = hang
        for _ in range(4):
            park(bench, "/call sloth {}")
        run = park(bench)
        tasks.task = lambda params: completed("t-1", "quick")
        ToolInvocation.objects.exclude(run=run["id"]).update(contact_at=clock.now())
        until(lambda: len(bench.engine.contacts.tasks) >= 2)
        ToolInvocation.objects.filter(run=run["id"]).update(contact_at=clock.now())
        assert bench.wait(run["id"])["answer"] == "It is quick."
        assert not ended
        until(lambda: len(bench.engine.contacts.tasks) == 2)
        release.set()


def test_the_many_calls_of_a_user_delay_no_other_user(bench, tasks, monkeypatch):
    """The requests of one user are all under way, and more of this user's calls are longest due."""
    monkeypatch.setattr("runs.engine.contacts.CONTACTS_PER_USER", 2)
    monkeypatch.setattr("runs.engine.contacts.CONTACTS_MAX", 3)
    add_tool(tasks)
    release = threading.Event()
    tasks.tool = parked_for_long
    greedy = [park(bench)["id"] for _ in range(4)]
    other = Driver(InProcess(session_client(UserFactory())))
    run = other.start(SCRIPT)["id"]
    until(lambda: Run.objects.filter(parked=True).count() == 5)

    def look(params: dict[str, Any]) -> Any:
        if params["taskId"] != "quick":
            release.wait(30)
        return completed(params["taskId"], "done")

    tasks.task = look
    quick = ToolInvocation.objects.filter(run=run)
    quick.update(remote_task=quick.get().remote_task.replace("t-1", "quick"), contact_at=None)
    ToolInvocation.objects.filter(run__in=greedy).update(contact_at=clock.now() - timedelta(minutes=1))
    until(lambda: len(bench.engine.contacts.tasks) >= 2)
    quick.update(contact_at=clock.now())
    assert other.wait(run)["status"] == "completed"
    assert len(bench.engine.contacts.tasks) == 2
    release.set()


def test_a_user_is_erased_while_a_server_is_asked(bench, tasks, caplog):
    add_tool(tasks)
    tasks.tool = parked_for_long
    tasks.task, asked, over = hanging(completed("t-1", "too late"))
    run = park(bench)
    ToolInvocation.objects.filter(run=run["id"]).update(contact_at=clock.now())
    assert asked.wait(20)
    privacy.erase(Run.objects.get(pk=run["id"]).user, "Asked on paper", lambda *_: None)
    over.set()
    until(lambda: not bench.engine.contacts.tasks)
    assert not Run.objects.filter(pk=run["id"]).exists()
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_an_engine_ends_although_a_request_ends_at_the_same_moment(engines, monkeypatch):
    engine = engines()

    def stop() -> None:
        engine.contacts.woken.set()
        end()

    end = engine.loop.stop
    monkeypatch.setattr(engine.loop, "stop", stop)
    engine.stop(0)
    engine.loop_thread.join(10)
    assert engine.loop.is_closed()


def test_an_engine_ends_with_all_its_requests_about_calls(bench, engines, tasks, monkeypatch):
    """One request is under way, and a look is about to begin another one."""
    add_tool(tasks)
    tasks.tool = parked_for_long
    runs = [park(bench)["id"] for _ in range(2)]
    tasks.task, asked, over = hanging(completed("t-1", "too late"))
    taken, closing, looked = (threading.Event() for _ in range(3))
    engine, look, take = bench.engine, bench.engine.contacts._look, lifecycle.take_contacts

    def take_and_wait(call_ids: list[str]) -> list[ToolInvocation]:
        calls = take(call_ids)
        if asked.is_set():
            taken.set()
            assert closing.wait(30)
        return calls

    async def looks() -> bool:
        more = await look()
        if closing.is_set():
            looked.set()
        return more

    def hand_over(worker_id: str) -> None:
        closing.set()
        assert looked.wait(30)
        hand_over_all(worker_id)

    monkeypatch.setattr(lifecycle, "take_contacts", take_and_wait)
    monkeypatch.setattr(engine.contacts, "_look", looks)
    monkeypatch.setattr("runs.engine.engine.hand_over_all", hand_over)
    for run, begun in zip(runs, (asked, taken), strict=True):
        ToolInvocation.objects.filter(run=run).update(contact_at=clock.now())
        assert begun.wait(30)
    engine.stop(0)
    engine.loop_thread.join(10)
    over.set()
    assert not asyncio.all_tasks(engine.loop)
    assert len(tasks.sent("tasks/get")) == 1
    assert {(call.awaiting, call.contacts) for call in ToolInvocation.objects.all()} == {("tool", 1)}
    tasks.task = lambda params: completed("t-1", "Hello")
    bench.engine = engines()
    ToolInvocation.objects.update(contact_at=clock.now())
    assert {bench.wait(run)["answer"] for run in runs} == {"It is Hello."}
