"""What a process imports when it starts. Each package here costs a process memory and every start time."""

import os
import subprocess
from pathlib import Path

import pytest

from config.serve.procfile import processes
from tests.stack.process import ROOT, python, run

SECRETS = "cryptography.fernet"
PAGES = ("config.urls", "unfold.admin", "rest_framework.views", "drf_spectacular.openapi", "runs.services")
WORKER = "from config.celery import app; app.loader.init_worker(); app.finalize()"
RUN_WORKER = f"{WORKER}; import runs.engine.engine as engine; engine.preload()"
WEB = "import config.asgi, config.urls"
CHECK = "import django; from django.core.management import call_command; django.setup(); call_command('check')"
BEAT = "from config.beat import app; app.loader.init_worker(); app.finalize()"


def environment(var_dir: Path) -> dict[str, str]:
    # A process that is not the first finds the generated secrets.
    (var_dir / "encryption_key").write_text("A" * 43 + "=")
    (var_dir / "session_key.pem").write_text("x")
    return {
        **{"PATH": os.environ["PATH"], "VAR_DIR": str(var_dir), "DJANGO_SETTINGS_MODULE": "config.settings"},
        # As --skip-checks of the Procfile does.
        "CELERY_SKIP_CHECKS": "true",
    }


def loaded_by(code: str, var_dir: Path) -> set[str]:
    """The modules that the code imports in a process of its own, which is no fork of one that has loaded some."""
    command, given = python("-c", f"{code}; import sys; print(*sys.modules)"), environment(var_dir)
    return set(subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, check=True).stdout.split())


def output(code: str, var_dir: Path) -> str:
    """What the code prints in a process of its own."""
    return run(python("-c", code), environment(var_dir)).stdout.strip()


@pytest.mark.parametrize(
    ("start", "unneeded"),
    [
        pytest.param(BEAT, ("django.db.models", "psycopg", "chats", "credits", "runs", "webhooks", SECRETS), id="beat"),
        pytest.param(WORKER, (*PAGES, "aiohttp", "runs.engine", "runs.llm", SECRETS), id="maintenance"),
        pytest.param(f"{WORKER}; import webhooks.dispatcher", (*PAGES, "runs.engine", "runs.llm"), id="webhooks"),
        pytest.param(RUN_WORKER, PAGES, id="runs"),
        pytest.param(WEB, ("aiohttp", "mcp", "markdown_it", "runs.engine", "celery.worker.consumer"), id="web"),
        pytest.param(
            CHECK, ("celery", "kombu", "redis", "jwt", "aiohttp", "mcp", "markdown_it", "runs.engine"), id="manage.py"
        ),
    ],
)
def test_a_process_does_not_import_what_it_does_not_need(tmp_path, start, unneeded):
    loaded = loaded_by(start, tmp_path)
    assert [name for name in unneeded if name in loaded] == []


def test_a_web_process_has_loaded_what_its_first_requests_need(tmp_path):
    assert {"celery", "jwt", "redis.asyncio"} <= loaded_by("import config.asgi", tmp_path)


def test_workers_do_not_load_the_routes_to_check_them():
    """Celery's default is to run Django's checks, which load every page, and to ignore what they find."""
    workers = [command for command in processes().values() if " worker " in command]
    assert workers
    assert [command for command in workers if "--skip-checks" not in command] == []


def test_the_checks_of_the_admin_see_the_pages_that_only_the_routes_load(tmp_path):
    start = "import django; django.setup(); from django.core.checks import run_checks; run_checks(tags=['admin'])"
    shown = "from django.contrib import admin; from runs.models import Run; print(admin.site.is_registered(Run))"
    assert output(f"{start}; {shown}", tmp_path) == "True"


def test_each_process_starts_what_the_platform_needs(tmp_path):
    """Django guesses an app's configuration only where a module has a single one."""
    start = "import django; django.setup(); from django.apps import apps; print(type(apps.get_app_config('config')))"
    assert "PlatformConfig" in output(start, tmp_path)
