"""A release widens the columns that the old processes read, while they serve: no request and no run fails."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.faults.load import NOT_NEEDED, QUICK, STREAM, Load, at_work
from tests.streams.conftest import StreamStack

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.services, pytest.mark.timeout(240)]

THREADS = 2
# The migration may take longer between two statements than QUICK allows.
MIGRATING = {"WEB_THREADS": str(THREADS), "config.settings.DATABASE_IDLE_TRANSACTION_SECONDS": "30"}
# A Django migration for each table, in a transaction of its own: longer texts, and bigint in place of integer.
WIDEN = """
from django.apps import apps
from django.db import connection, migrations, models
from django.db.migrations.loader import MigrationLoader

WIDER = {
    "CharField": models.CharField,
    "PositiveIntegerField": models.PositiveBigIntegerField,
    "PositiveSmallIntegerField": models.PositiveIntegerField,
}
state = MigrationLoader(connection).project_state()
labels = ("auth", "api", "apikeys", "chats", "credits", "runs", "webhooks")
for model in [model for label in labels for model in apps.get_app_config(label).get_models()]:
    migration = migrations.Migration("widen", model._meta.app_label)
    for field in model._meta.local_concrete_fields:
        kind = field.get_internal_type()
        # A trigger of the ledger depends on its type.
        if kind in WIDER and not field.primary_key and str(field) != "credits.LedgerEntry.type":
            _, _, _, given = field.deconstruct()
            options = {name: given[name] for name in ("null", "unique", "db_default") if name in given}
            if kind == "CharField":
                options["max_length"] = field.max_length + 10
            altered = migrations.AlterField(model._meta.model_name, field.name, WIDER[kind](**options))
            migration.operations = [*migration.operations, altered]
    with connection.schema_editor(atomic=True) as editor:
        state = migration.apply(state, editor)
"""
PATHS = ("/runs/{run}", "/runs", "/chats", "/chats/{chat}/messages", "/me/credits", "/webhooks", "/webhooks/deliveries")
# psycopg prepares a statement when a connection executes it for the fifth time.
PREPARED = 6


class Readers:
    """Users that read everything, again and again. ``answers`` are the answers other than 200."""

    def __init__(self, load: Load, run_id: str) -> None:
        self.load, self.run_id = load, run_id
        self.chat_id = load.driver.get(run_id)["chatId"]
        self.stopped = threading.Event()
        self.rounds = 0
        self.wrong: list[str] = []

    def read(self) -> None:
        while not self.stopped.is_set():
            for path in PATHS:
                answered = self.load.http.get(path.format(run=self.run_id, chat=self.chat_id))
                if answered.status_code != 200:
                    self.wrong.append(f"{path}: {answered.status_code} {answered.text[:200]}")
            self.rounds += 1

    def stream(self, server: str) -> None:
        stack = self.load.stack
        assert isinstance(stack, StreamStack)
        listener = stack.listener(server, self.load.user)
        while not self.stopped.is_set():
            received = listener.all(self.load.start(STREAM))
            if not received or received[-1][2].get("status") != "completed":
                self.wrong.append(f"a stream of the {server} process ended early")

    def more(self) -> Callable[[], bool]:
        """Whether each thread of the web process has read everything often enough since this call."""
        goal = self.rounds + THREADS * PREPARED
        return lambda: self.rounds >= goal


@contextlib.contextmanager
def reading(load: Load, run_id: str) -> Iterator[Readers]:
    readers = Readers(load, run_id)
    with ThreadPoolExecutor(4) as pool:
        work: list[Future[None]] = [pool.submit(readers.read) for _ in range(2)]
        work += [pool.submit(readers.stream, server) for server in ("web", "stream")]
        try:
            yield readers
        finally:
            readers.stopped.set()
        for future in work:
            future.result()


def test_a_migration_that_widens_columns_fails_no_request_and_no_run() -> None:
    with at_work(StreamStack, environment={**QUICK, **MIGRATING}, without=NOT_NEEDED) as load:
        with load.going(14, seconds=10):
            run_id = load.start(STREAM)
            load.driver.wait(run_id, "completed")
            with reading(load, run_id) as readers:
                load.stack.wait_for(readers.more(), 120, "prepared statements")
                load.stack.manage("shell", "--no-imports", "-c", WIDEN)
                load.stack.wait_for(readers.more(), 120, "reads after the migration")
                assert load.http.get(f"{load.stack.url}/readyz").status_code == 200
            assert readers.wrong == []
        load.check()
