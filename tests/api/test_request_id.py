"""X-Request-Id: on every answer, in every log line, and in the tasks that a request starts (docs/api.md)."""

import json
import re

import pytest
from celery import shared_task
from django.test import Client

from config.celery import app
from config.telemetry import logs

pytestmark = [pytest.mark.django_db, pytest.mark.urls("tests.api.urls")]


@pytest.mark.parametrize("path", ["/api/v1/me", "/api/nothing", "/livez", "/nothing", "/api/fail/crash"])
def test_every_answer_has_a_request_id(path):
    client = Client(raise_request_exception=False)
    first, second = client.get(path)["X-Request-Id"], client.get(path)["X-Request-Id"]
    assert first != second
    assert re.fullmatch(r"[A-Za-z0-9._-]{1,128}", first)


@pytest.mark.parametrize("given", ["a", "A-1._z", "x" * 128])
def test_a_valid_id_of_the_caller_is_kept(session, given):
    assert session.get("/api/v1/me", HTTP_X_REQUEST_ID=given)["X-Request-Id"] == given


@pytest.mark.parametrize("given", ["", " ", "a b", "x" * 129, "ü", "a\n", "a,b", "<x>"])
def test_a_malformed_id_is_replaced(session, given):
    assert session.get("/api/v1/me", HTTP_X_REQUEST_ID=given)["X-Request-Id"] != given


def test_it_is_in_the_log_lines_of_the_request(session, caplog, monkeypatch):
    monkeypatch.setattr(caplog.handler, "formatter", logs.JsonFormatter())
    session.post("/api/v1/groups", {"name": "crash"}, format="json", HTTP_X_REQUEST_ID="mine")
    assert {json.loads(line)["request_id"] for line in caplog.text.splitlines()} == {"mine"}


def test_it_is_sent_with_a_task_message():
    seen = []

    @shared_task(name="tests.note_request_id")
    def note() -> None:
        seen.append(logs.request_id.get())

    with app.connection_for_write(url="memory://") as connection:
        logs.request_id.set("mine")
        note.apply_async(connection=connection)
        logs.request_id.set("-")
        note.apply_async(connection=connection)
        queue = connection.SimpleQueue(app.conf.task_default_queue)
        for _ in range(2):
            message = queue.get(timeout=30)
            message.ack()
            # A worker puts the message's headers into the task's request.
            note.push_request(**message.headers)
            logs.read_headers(task=note)
            note.run()
            logs.reset()
            note.pop_request()
    assert seen == ["mine", "-"]
    assert logs.request_id.get() == "-"
