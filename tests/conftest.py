"""Fixtures that the tests of all apps share."""

import logging
import socket
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import Permission
from django.contrib.contenttypes.models import ContentType
from django.core.management.commands import flush
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.postgresql.operations import DatabaseOperations
from django.test import TransactionTestCase, override_settings
from django.utils import timezone
from rest_framework.test import APIClient
from whitenoise.middleware import WhiteNoiseMiddleware

from config.kernel import clock
from config.kernel.garbage import collect_less_often, freeze_loaded_objects
from config.queue import publisher
from runs import catalogue
from tests import factories
from tests.tiers import FAST, LONG

# Folders and files with slow tests: real processes, or loops over all operations or pages. `make test-services` runs
# them. tests/tiers.py is for single tests and for values of parameters.
SLOW_FILES = {
    "test_browser.py",
    "test_listen.py",
    "test_samples.py",
    "test_start_imports.py",
    "test_tour.py",
    "test_worst_inputs.py",
}
# Files that take longest, mostly by many whole runs. Of `make test`, only ALL=1 executes them.
LONG_FILES = {
    "api/test_front.py",
    "chats/test_object_storage.py",
    "fronts/test_ag_ui.py",
    "fronts/test_ag_ui_answers.py",
    "fronts/test_ai_sdk.py",
    "fronts/test_ai_sdk_answers.py",
    "lifecycle/test_context.py",
    "lifecycle/test_model_changes.py",
    "lifecycle/test_partial_charges.py",
    "lifecycle/test_provider_limits.py",
    "lifecycle/test_replaces.py",
    "lifecycle/test_summaries.py",
    "lifecycle/test_tool_places.py",
    "lifecycle/test_waits_for_credits.py",
    "llm/test_journals.py",
    "llm/test_lying_providers.py",
    "llm/test_request_types.py",
    "llm/test_token_bounds.py",
    "operations/test_people.py",
    "outbound/test_deadlines.py",
    "tools/test_import.py",
    "tools/test_mcp.py",
    "tools/test_mcp_runs.py",
    "tools/test_mcp_tasks.py",
    "tools/test_parked.py",
    "webhooks/test_dispatch.py",
}
SLOW = {"admin", "clients", "concurrency", "contract", "deployed", "e2e", "faults", "isolation", "mcp", "streams"}

FAULTS = ("faults", "isolation")
# Tests that measure time, or whose runs must not end or lose their lease before an outage begins.
ALONE_FILES = {"test_outages.py", "test_tool_isolation.py", "test_webhook_isolation.py", "test_takeover.py"}


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """`make test` runs nothing of these folders and files, so it does not import them."""
    is_slow = collection_path.name in SLOW | SLOW_FILES
    is_long = not LONG and "/".join(collection_path.parts[-2:]) in LONG_FILES
    return True if FAST and (is_slow or is_long) else None


# A test that neither these fixtures nor these markers give the database, servers or processes has the same outcome with
# every database: pytest-django refuses it all connections. `make test ALL=1` runs it, and the services suite does not.
FIXTURES = {"db", "transactional_db", "django_db_setup", "live_server", "redis_server", "postgres_server"}
MARKERS = {"django_db", "stack", "services", "faults", "slow"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name in SLOW or item.path.name in SLOW_FILES:
            item.add_marker(pytest.mark.slow)
        if item.path.parent.name == "isolation" or item.path.name in ALONE_FILES:
            item.add_marker(pytest.mark.alone)
            # The tests of isolation share a service, so one worker runs all of them. The others share one in a file.
            shares = item.path.parent if item.path.parent.name == "isolation" else item.path
            item.add_marker(pytest.mark.xdist_group(shares.name))
        if item.get_closest_marker("faults") and item.path.parent.name not in FAULTS:
            raise pytest.UsageError(f"{item.nodeid}: `make test-faults` looks into {FAULTS} alone")
        if not MARKERS & {mark.name for mark in item.iter_markers()} and not FIXTURES & set(item.fixturenames):
            item.add_marker(pytest.mark.once)
    # Files that start processes come first, and among them those with the fewest tests, because these tests take
    # longest. A long test at the end would run while the other workers are idle.
    tests, most = Counter(item.path for item in items), len(items)
    items.sort(key=lambda item: tests[item.path] if item.get_closest_marker("stack") else most)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    collect_less_often()
    # With --reruns, a worker writes to the controller before each test, and then asks it. The kernel would hold the
    # question back for 40 ms, until the first message is acknowledged.
    if hasattr(config, "workerinput"):
        config.failures_db.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def pytest_unconfigure() -> None:
    """What ends with the process may log, to streams that pytest has closed."""
    logging.raiseExceptions = False


def pytest_collection_finish() -> None:
    """Modules and tests stay until the end. Each full collection of garbage would examine them again."""
    freeze_loaded_objects()


@pytest.fixture(autouse=True, scope="session")
def static_files_are_looked_for_once() -> Iterator[None]:
    """Each test client creates the middleware, which would otherwise scan all static files every time."""
    look, found = WhiteNoiseMiddleware.add_files_from_finders, {}

    def once(middleware: WhiteNoiseMiddleware) -> None:
        if not found:
            look(middleware)
            found.update(middleware.files)
        middleware.files.update(found)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WhiteNoiseMiddleware, "add_files_from_finders", once)
        yield


@pytest.fixture(autouse=True, scope="session")
def tables_are_as_installed() -> Iterator[None]:
    """The flush after a transactional test leaves the rows of a new installation. It derives the permissions from the
    models again only if the test added or deleted some.
    """
    derive, tables = flush.emit_post_migrate_signal, (ContentType, Permission)
    derived: dict[str, list[int]] = {}
    others: dict[str, list[str]] = {}

    def delete_others(style: Any, connection: BaseDatabaseWrapper, **options: Any) -> list[str]:
        if connection.alias not in others:
            found = connection.introspection.django_table_names(only_existing=True, include_views=False)
            kept = {table._meta.db_table for table in tables}
            others[connection.alias] = [name for name in found if name not in kept]
        return connection.ops.sql_flush(style, others[connection.alias], **options)

    def restore(verbosity: int, interactive: bool, db: str) -> None:
        if derived.get(db) != [table.objects.using(db).count() for table in tables]:
            for table in reversed(tables):
                table.objects.using(db).all().delete()
            derive(verbosity, interactive, db)
            derived[db] = [table.objects.using(db).count() for table in tables]
        factories.seed_catalogue()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flush, "sql_flush", delete_others)
        patch.setattr(flush, "emit_post_migrate_signal", restore)
        # A new connection would read the descriptions of all tables, which takes longer than most tests.
        patch.setattr(TransactionTestCase, "_should_reload_connections", lambda case: False)
        yield


@pytest.fixture(autouse=True, scope="session")
def tables_are_emptied_fast() -> Iterator[None]:
    """The flush of a transactional test deletes the few rows. Django's TRUNCATE makes new files for all tables and
    indexes, which takes half a second. Only a superuser may delete rows of the ledger, and in any order.
    """
    truncate = DatabaseOperations.sql_flush

    def delete(self: DatabaseOperations, style: Any, tables: list[str], **options: Any) -> list[str]:
        self.connection.ensure_connection()
        if self.connection.connection.info.parameter_status("is_superuser") != "on":
            return truncate(self, style, tables, **options)
        statements = [f"DELETE FROM {self.quote_name(table)}" for table in tables]
        return ["; ".join(["SET LOCAL session_replication_role = replica", *statements])]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DatabaseOperations, "sql_flush", delete)
        yield


@pytest.fixture(autouse=True, scope="session")
def passwords_are_hashed_fast() -> Iterator[None]:
    """A secure hash of a password takes a quarter of a second, on purpose."""
    with override_settings(PASSWORD_HASHERS=["django.contrib.auth.hashers.MD5PasswordHasher"]):
        yield


@pytest.fixture(autouse=True)
def clock_is_right() -> Iterator[None]:
    """A test that moves the steady clock must not leave this process with a wrong time. The next look at the database's
    time, a query, is due after this test, whose queries may be counted.
    """
    if clock._synced is not None:
        clock._next_sync = clock.steady() + clock.DATABASE_CLOCK_SECONDS
    yield
    if clock._synced is not None:
        moment, at = clock._synced
        if abs(moment + timedelta(seconds=clock.steady() - at) - timezone.now()) > timedelta(seconds=1):
            clock._synced = None


@pytest.fixture(autouse=True)
def nudges(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...], float | None]]:
    """The published messages as (task, args, countdown). Only tests with a real stack use a broker."""
    published: list[tuple[str, tuple[Any, ...], float | None]] = []
    monkeypatch.setattr(
        publisher, "nudge", lambda task, *args, countdown=None: published.append((task, args, countdown))
    )
    return published


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The catalogue that this process has read may be that of another test."""
    catalogue.forget()


@pytest.fixture
def user(db):
    return factories.UserFactory()


@pytest.fixture
def session(user) -> APIClient:
    """A client of /api/v1 as ``user``."""
    return factories.session_client(user)


@pytest.fixture
def public(user) -> APIClient:
    """A client of /api/public/v1 as ``user``, with a key of the default scopes."""
    return factories.public_client(user)
