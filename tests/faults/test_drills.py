"""The drills of docs/deploy.md, with the commands that the page shows, while runs are in progress."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
import redis
import requests

from tests.faults.load import NOT_NEEDED, PLAIN, QUESTION, TOOLS, Kind, at_work, require_correct_data
from tests.stack import postgres
from tests.stack.process import ROOT, Process, free_port, python

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.services, pytest.mark.timeout(300)]

PAGE = (ROOT / "docs" / "deploy.md").read_text()
LONG = Kind("/stream 120 100\n/say and the end", "and the end")


def commands(heading: str) -> str:
    """The block of a section that is marked as a drill."""
    section = PAGE[PAGE.index(f" {heading}\n") :]
    found = re.search(r"^( *)```bash drill\n(.*?)^\1```$", section, re.M | re.S)
    assert found
    return found[2]


def execute(code: str, environment: dict[str, str], directory: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Execute the block as an operator does, with the programs beside the server and the tests' Python."""
    programs = [str(Path(sys.executable).parent), str(postgres.server_binaries(postgres.unprivileged_user()))]
    path = os.pathsep.join([*programs, os.environ["PATH"]])
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        cwd=directory,
        env=environment | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


# --- restore ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def restored() -> Iterator[str]:
    """The address of an empty database."""
    url = postgres.create_database(os.environ["TEST_DATABASE_URL"])
    yield url
    postgres.drop_database(url)


def test_runs_continue_on_a_restored_database(restored: str) -> None:
    with at_work(without=NOT_NEEDED) as load:
        stack = load.stack
        finished = load.start_all(PLAIN, TOOLS)
        for run_id in finished:
            load.driver.wait(run_id, "completed")
        load.nobody_answers()
        running, waiting = load.start(LONG), load.start(QUESTION)
        load.driver.wait(waiting, "waiting")
        load.driver.wait(running, "running")
        drilled = execute(commands("The restore drill"), stack.environment | {"RESTORED_URL": restored})
        assert drilled.returncode == 0, drilled.stdout + drilled.stderr
        assert "All invariants hold." in drilled.stdout
        assert "Every account agrees with its ledger." in drilled.stdout
        with psycopg.connect(restored) as connection:
            statuses = dict(connection.execute("SELECT id, status FROM runs_run").fetchall())
        assert statuses == dict.fromkeys(finished, "completed") | {running: "running", waiting: "waiting"}

        lost = load.start(PLAIN)
        load.driver.wait(lost, "completed")
        for process in stack.processes.values():
            process.kill()
        redis.Redis.from_url(stack.environment["REDIS_URL"]).flushdb()
        stack.environment["DATABASE_URL"] = restored
        stack.restart(*stack.processes, environment={"DATABASE_URL": restored})

        assert load.http.get(f"/runs/{lost}").status_code == 404  # it is newer than the backup
        load.respond(load.driver.wait(waiting, "waiting")["pendingWaitpoint"])
        for run_id, kind in ((finished[0], PLAIN), (finished[1], TOOLS), (running, LONG), (waiting, QUESTION)):
            ended = load.driver.wait(run_id, timeout=90)
            assert ended["status"] == "completed"
            assert load.driver.content(ended).endswith(kind.ending)
        assert load.sql("SELECT lease_losses FROM runs_run WHERE id = %s", running) == [(1,)]
        assert load.wrong == []
        require_correct_data(stack)


def test_a_failed_restore_ends_the_drill(restored: str) -> None:
    missing = postgres.with_database(restored, "missing")
    code = commands("The restore drill")
    drilled = execute(code, dict(os.environ) | {"DATABASE_URL": restored, "RESTORED_URL": missing})
    assert drilled.returncode != 0
    assert "All invariants hold." not in drilled.stdout


# --- upgrade ---------------------------------------------------------------------------------------------------------
MIGRATION = """
from django.db import migrations, models

class Migration(migrations.Migration):
    dependencies = [("runs", "{latest}")]
    operations = [
        migrations.AddField("run", "drilled", models.CharField(max_length=10, db_default="")),
        migrations.CreateModel("Drill", [("id", models.BigAutoField(primary_key=True))]),
    ]
"""
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "var", "tests", "node_modules", ".*_cache")


@pytest.fixture
def next_release(tmp_path: Path) -> Path:
    """The code with one more migration: a column and a table."""
    code = tmp_path / "next"
    shutil.copytree(ROOT, code, ignore=LEFT_OUT)
    migrations = code / "runs" / "migrations"
    latest = max(file.stem for file in migrations.glob("0*.py"))
    (migrations / "9999_drill.py").write_text(MIGRATION.format(latest=latest))
    return code


def test_an_upgrade_loses_no_run(next_release: Path, tmp_path: Path) -> None:
    with at_work(without=NOT_NEEDED) as load:
        stack = load.stack
        port = free_port()
        new = Process(
            "new web",
            python("-m", "config.serve", "--host", "127.0.0.1"),
            log=tmp_path / "new.log",
            environment=stack.environment | {"PORT": str(port)},
            directory=next_release,
        )
        with load.going(14, seconds=10), ThreadPoolExecutor(1) as pool:
            new.start()
            try:
                ready = lambda: readiness(port)  # noqa: E731
                stack.wait_for(lambda: ready() == (503, "not applied: runs.9999_drill"), 60, "the missing migration")
                waiting = pool.submit(execute, commands("The first day"), stack.environment, next_release)
                drilled = execute(commands("The upgrade drill"), stack.environment, next_release)
                assert drilled.returncode == 0, drilled.stdout + drilled.stderr
                assert "Applying runs.9999_drill... OK" in drilled.stdout
                assert waiting.result(60).returncode == 0
                stack.wait_for(lambda: ready() == (200, "ok"), 60, "the readiness of the new code")
            finally:
                new.kill()
            load.start(LONG)
            for name in ("webhooks", "runs-1", "runs-2", "web"):
                stack.processes[name].directory = next_release
                stack.restart(name)
        load.check(timeout=90)


def readiness(port: int) -> tuple[int, str]:
    """The status and the state of the migrations."""
    try:
        answer = requests.get(f"http://127.0.0.1:{port}/readyz", timeout=10)
    except requests.ConnectionError:
        return 0, ""
    return answer.status_code, answer.json()["checks"]["migrations"]
