"""Tests of the ids in the log lines of a run that a worker started without a nudge."""

import json
import logging

from config.kernel import clock
from config.queue import publisher
from config.telemetry import logs
from runs import lifecycle
from runs.models import Run
from tests.lifecycle.conftest import Bench
from tests.operations.test_logs import Lines


def test_log_lines_contain_the_request_id_of_a_run_started_without_a_nudge(session, engines, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError

    monkeypatch.setattr(lifecycle, "complete", broken)
    lines = Lines(logs.JsonFormatter())
    logging.getLogger("runs").addHandler(lines)
    try:
        engine = engines()
        monkeypatch.setattr(publisher, "nudge", lambda *message, **options: None)
        bench = Bench(session, engine)
        chat = bench.chat()
        run = session.post(
            f"/api/v1/chats/{chat}/runs", {"message": "Hello"}, format="json", HTTP_X_REQUEST_ID="mine"
        ).json()
        Run.objects.filter(pk=run["id"]).update(due_at=clock.now())
        assert bench.wait(run["id"])["errorCode"] == "INTERNAL_ERROR"
    finally:
        logging.getLogger("runs").removeHandler(lines)
    (logged,) = [json.loads(line) for line in lines.lines if "unexpected reason" in line]
    assert (logged["request_id"], logged["run_id"], logged["task_id"]) == ("mine", run["id"], engine.process.worker_id)
