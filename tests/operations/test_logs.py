"""Log lines: the ids that they must have and the content that they must not have.

tests/deployed/test_canaries.py checks the same with real processes.
"""

import asyncio
import json
import logging
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
from celery import shared_task
from celery.app.trace import build_tracer
from django.conf import settings
from django.utils.module_loading import import_string

from config import celery
from config.queue import publisher
from config.telemetry import logs
from tests import factories
from tests.webhooks.conftest import deliver, emit
from tests.webhooks.receiver import answer, receiving
from webhooks import services
from webhooks.models import Delivery

CANARY = "canary-4711"


class Lines(logging.Handler):
    """Collects the lines that a process with this formatter would write."""

    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.addFilter(logs.SafeMessage())
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture
def listen() -> Iterator[Callable[[logging.Formatter], list[str]]]:
    handlers: list[Lines] = []
    # Requests of tests before leave their ids.
    logs.reset()

    def attach(formatter: logging.Formatter) -> list[str]:
        handlers.append(Lines(formatter))
        logging.getLogger().addHandler(handlers[-1])
        return handlers[-1].lines

    yield attach
    for handler in handlers:
        logging.getLogger().removeHandler(handler)
    logs.reset()


def fail() -> None:
    try:
        {}[CANARY]
    except KeyError as error:
        raise ValueError(f"could not read {CANARY}") from error


def test_a_json_line_has_its_request_run_and_task(listen):
    lines = listen(logs.JsonFormatter())
    for variable, value in zip(logs.VARIABLES, ("req", "run_1", "task"), strict=True):
        variable.set(value)
    logging.getLogger("runs.x").warning("a line with\n%s", "two ends", extra={"args_of_it": CANARY})
    (line,) = lines
    logged = json.loads(line)
    assert "\n" not in line
    assert logged.pop("time").endswith("+00:00")
    assert logged.pop("process") > 0
    assert logged == {
        "level": "WARNING",
        "logger": "runs.x",
        "message": "a line with\ntwo ends",
        "request_id": "req",
        "run_id": "run_1",
        "task_id": "task",
    }


def test_an_outage_has_one_line_a_minute_and_kind(listen, monkeypatch):
    lines = listen(logs.JsonFormatter())
    minutes = [0.0]
    monkeypatch.setattr(logs.time, "monotonic", lambda: 60 * minutes[0])
    (handler,) = [each for each in logging.getLogger().handlers if getattr(each, "lines", None) is lines]
    handler.addFilter(import_string(settings.LOGGING["filters"]["outages"]["()"])())
    for minutes[0] in (0, 0.5, 1.1):
        for number in range(3):
            publisher.nudges_failed(OSError(number))
            logging.getLogger("config.redis").warning("Redis failed (%s)", number)
            logging.getLogger("runs.lifecycle.moves").info("run %s ended", number)
    found = [json.loads(line)["logger"].rpartition(".")[2] for line in lines]
    assert {name: found.count(name) for name in found} == {"publisher": 2, "redis": 2, "moves": 9}


def test_a_local_line_is_short(listen):
    lines = listen(logs.TextFormatter())
    logs.run_id.set("run_1")
    logging.getLogger("runs.x").warning("hello")
    assert lines[0].endswith("WARNING runs.x: hello  run_id=run_1")


@pytest.mark.parametrize("formatter", [logs.JsonFormatter, logs.TextFormatter])
@pytest.mark.parametrize("with_messages", [False, True])
def test_what_an_exception_quotes_is_for_developers_alone(listen, settings, formatter, with_messages):
    settings.DEBUG, lines = with_messages, listen(formatter())
    try:
        raise ExceptionGroup(CANARY, [ValueError(CANARY)])
    except ExceptionGroup:
        logging.getLogger("runs.x").exception("it broke")
    try:
        fail()
    except ValueError:
        logging.getLogger("runs.x").exception("it broke")
    text = "".join(lines)
    assert (CANARY in text) == with_messages
    for word in ("it broke", "ValueError", "KeyError", "ExceptionGroup", "test_logs.py", "in fail"):
        assert word in text


def test_a_failed_task_is_logged_without_its_arguments(listen):
    lines = listen(logs.JsonFormatter())

    @shared_task(name="tests.break")
    def broken(argument: str) -> None:
        fail()

    trace = build_tracer("tests.break", broken, app=celery.app)
    trace("id-1", [CANARY], {}, {"id": "id-1", "task": "tests.break", "hostname": "here", "is_eager": False})
    (line,) = [json.loads(line) for line in lines if "tests.break" in line]
    assert line["message"] == "task tests.break raised unexpected"
    assert line["task_id"] == "id-1"
    assert "in fail" in line["exception"]
    assert CANARY not in "".join(lines)


def test_a_never_retrieved_task_exception_is_logged_without_content(listen):
    lines = listen(logs.JsonFormatter())

    async def forget() -> None:
        async def broken() -> None:
            fail()

        task = asyncio.ensure_future(broken())
        await asyncio.wait([task])
        del task

    asyncio.run(forget())
    assert any("never retrieved" in line for line in lines)
    assert CANARY not in "".join(lines)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ends_with_an_exception_is_logged(listen, monkeypatch):
    lines = listen(logs.JsonFormatter())
    monkeypatch.setattr(threading, "excepthook", logs.log_thread_failure)
    thread = threading.Thread(target=fail, name="worker-7")
    thread.start()
    thread.join()
    leaving = threading.Thread(target=sys.exit)
    leaving.start()
    leaving.join()
    (line,) = lines
    assert json.loads(line)["message"] == "the thread worker-7 ended"
    assert CANARY not in line


@pytest.mark.django_db
def test_the_run_id_of_the_path_is_in_the_log_line(session, listen, monkeypatch):
    lines = listen(logs.JsonFormatter())

    def broken(*args: object) -> None:
        logging.getLogger("runs.x").warning("looking")

    monkeypatch.setattr("runs.views.services.find_run", broken)
    session.get("/api/v1/runs/run_01k0000000", HTTP_X_REQUEST_ID="mine")
    session.get("/api/v1/runs/run%0Aforged")
    session.get("/api/v1/me")
    logged = [json.loads(line) for line in lines if "looking" in line]
    assert (logged[0]["run_id"], logged[0]["request_id"]) == ("run_01k0000000", "mine")
    assert "forged" not in "".join(lines)
    assert logs.run_id.get() == logs.NONE


@pytest.mark.django_db
def test_a_line_about_a_webhook_attempt_names_its_request_and_run(user, listen):
    lines = listen(logs.JsonFormatter())
    with receiving(answer(500, CANARY.encode())) as receiver:
        factories.EndpointFactory(user=user, url=f"{receiver.url}?token={CANARY}")
        services.send_test(user)
        for run_id, request_id in (("run_1", "mine"), ("run_2", "")):
            emit(user.pk, "agent.started", run_id=run_id, chat_id="chat_1", request_id=request_id)
        deliver()
    logged = [json.loads(line) for line in lines if "attempt 1 failed: status 500" in line]
    deliveries = {delivery.run_id: delivery.pk for delivery in Delivery.objects.all()}
    assert {(line["request_id"], line["run_id"], line["task_id"]) for line in logged} == {
        ("mine", "run_1", deliveries["run_1"]),
        ("-", "run_2", deliveries["run_2"]),
        ("-", "-", deliveries[None]),
    }
    assert CANARY not in "".join(lines)
    assert logs.run_id.get() == logs.task_id.get() == logs.NONE
