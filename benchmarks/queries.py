"""The CPU that the compiled queries save, on PostgreSQL.

Each query is measured in turns with the same query by the ORM. The ratio is the saved share of the work that contains
the query: a GET through the WSGI application, a run (its POST, its claim and its last turn, without the model, Celery
and the event loop), or a run that is cancelled while it is queued.

``make bench``, or ``python -m tests.stack.run_services python -m benchmarks queries``.
"""

import importlib
import io
import json
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

from benchmarks.harness import Metric, django_database, report

ROUNDS, CALLS, WORK_CALLS = 10, 100, 20
# The compiled queries, by module.
QUERIES = {
    "config.api.authentication": ["user_named"],
    "credits.ledger": ["_account"],
    "credits.sums": ["open_holds"],
    "runs.lifecycle.line": ["_locked_run", "lock_user", "_next_blocked", "_next_throttled"],
    "runs.services": ["_calls", "_chat", "_pending", "_run"],
}


class Recorder:
    """Calls the compiled query and records the arguments."""

    def __init__(self, query: Any) -> None:
        self.query = query
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *arguments: Any) -> list[Any]:
        self.calls.append(arguments)
        found: list[Any] = self.query(*arguments)
        return found

    def first(self, *arguments: Any) -> Any:
        return next(iter(self(*arguments)), None)


class Service:
    """Calls the service's code in this process."""

    def __init__(self) -> None:
        from django.conf import settings
        from django.core.wsgi import get_wsgi_application

        from config.api.authentication import user_of
        from config.api.session_tokens import mint
        from runs.models import Worker

        settings.RATE_LIMIT_SESSION = 0
        settings.RATE_LIMIT_RUN_STARTS = 0
        self.application = get_wsgi_application()
        user_of({"sub": "ada"})
        self.token = mint("ada")
        self.chats: list[str] = []
        self.worker = Worker.objects.create(host="benchmark", pid=1, expires_at="2100-01-01T00:00:00Z")
        self.completed, self.waiting = self.run(), self.wait()

    def request(self, method: str, path: str, body: Any = None) -> Any:
        content = b"" if body is None else json.dumps(body).encode()
        environ = {
            "REQUEST_METHOD": method,
            "PATH_INFO": path,
            "SERVER_NAME": "localhost",
            "SERVER_PORT": "80",
            "SERVER_PROTOCOL": "HTTP/1.1",
            "HTTP_HOST": "localhost",
            "REMOTE_ADDR": "127.0.0.1",
            "HTTP_AUTHORIZATION": f"Bearer {self.token}",
            "CONTENT_TYPE": "application/json",
            "CONTENT_LENGTH": str(len(content)),
            "wsgi.input": io.BytesIO(content),
            "wsgi.errors": io.StringIO(),
            "wsgi.url_scheme": "http",
        }
        statuses: list[str] = []
        response = self.application(environ, lambda status, headers: statuses.append(status))
        answer = b"".join(response)
        response.close()
        if statuses[0][0] != "2":
            raise RuntimeError(f"{statuses[0]}: {answer[:300]!r}")
        return json.loads(answer)

    def prepare(self) -> None:
        """Create a chat for each later run, so that the history of a chat does not affect the times."""
        count = (ROUNDS + 1) * WORK_CALLS + 1
        self.chats = [self.request("POST", "/api/v1/chats", {})["id"] for _ in range(count)]

    def start(self) -> str:
        if not self.chats:
            self.prepare()
        path = f"/api/v1/chats/{self.chats.pop()}/runs"
        run_id: str = self.request("POST", path, {"message": "Hello"})["id"]
        return run_id

    def cancel(self) -> None:
        self.request("POST", f"/api/v1/runs/{self.start()}/cancel")

    def wait(self) -> str:
        """Create a run that waits for an answer. Returns its id."""
        from runs.models import Run
        from tests.factories import WaitpointFactory, force_update

        run_id = self.start()
        force_update(Run.objects.filter(pk=run_id), status="waiting")
        WaitpointFactory(run=Run.objects.get(pk=run_id))
        return run_id

    def run(self) -> str:
        """Execute a run from its POST to completed. Returns its id."""
        from config.kernel import clock
        from runs import lifecycle
        from runs.engine.session import claim_and_load
        from runs.models import Turn

        run_id = self.start()
        claimed = claim_and_load(run_id, self.worker.pk)
        if claimed is None:
            raise RuntimeError("the run was not claimed")
        now = clock.now()
        turn = Turn(run=claimed.run, index=1, model="demo", text="Hello", started_at=now, finished_at=now)
        lifecycle.complete(claimed.run, turn, content="Hello", delta="Hello", charge=None)
        return run_id

    def paths(self) -> dict[str, Callable[[], Any]]:
        return {
            "a run": self.run,
            "a cancelled run": self.cancel,
            "GET run": partial(self.request, "GET", f"/api/v1/runs/{self.completed}"),
            "GET waiting run": partial(self.request, "GET", f"/api/v1/runs/{self.waiting}"),
            "GET credits": partial(self.request, "GET", "/api/v1/me/credits"),
        }


def by_turns(works: dict[str, Callable[[], Any]], calls: int) -> dict[str, float]:
    """The CPU time of this process per call of each work in microseconds: medians of ROUNDS."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for number in range(ROUNDS + 1):
        for name, work in works.items():
            begun = time.process_time()
            for _ in range(calls):
                work()
            if number:  # the first round plans statements and fills caches
                found[name].append((time.process_time() - begun) / calls * 1e6)
    return {name: statistics.median(values) for name, values in found.items()}


def queries_of(work: Callable[[], Any]) -> dict[str, Recorder]:
    """The compiled queries that ``work`` calls, by name."""
    recorders: dict[str, Recorder] = {}
    with ExitStack() as patches:
        for path, names in QUERIES.items():
            module = importlib.import_module(path)
            for name in names:
                recorders[name] = Recorder(getattr(module, name))
                patches.enter_context(patch.object(module, name, recorders[name]))
        work()
    return {name: recorder for name, recorder in recorders.items() if recorder.calls}


def measure() -> list[Metric]:
    from django.core.management import call_command
    from django.db import transaction

    call_command("migrate", verbosity=0)
    service = Service()
    metrics = []
    for path, work in service.paths().items():
        service.prepare()
        recorders = queries_of(work)
        whole = by_turns({path: work}, WORK_CALLS)[path]
        for name, recorder in recorders.items():
            query, arguments = recorder.query, recorder.calls[0]
            ways = {"compiled": partial(query, *arguments), "orm": lambda q=query, a=arguments: list(q.build(*a))}
            with transaction.atomic():
                took = by_turns(ways, CALLS)
            saved = (took["orm"] - took["compiled"]) * len(recorder.calls) / whole
            measured, baseline = f"{took['compiled']:.0f} µs compiled", f"{took['orm']:.0f} µs by the ORM"
            metrics.append(Metric(f"{path} of {whole:.0f} µs: {name}", measured, baseline, saved, "saves ≥ 0.05"))
    return metrics


def main() -> None:
    with django_database():
        metrics = measure()
    report("queries", metrics)


if __name__ == "__main__":
    main()
