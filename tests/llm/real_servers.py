"""Model servers of other projects, as processes. Each is installed once, with the packages that ``pins`` names, in a
virtual environment of its own under var/.
"""

import fcntl
import hashlib
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml

from tests.stack.process import ROOT, Process, free_port, python, remove_directory, temporary_directory, wait_for

HERE = Path(__file__).resolve().parent
INSTALL_SECONDS = 300
START_SECONDS = 150
CONTEXT_TOKENS = 1024


def environment_of(name: str) -> Path:
    """The directory of the programs of ``pins/NAME.txt``. Skips the test if the registry does not have a package."""
    pins = HERE / "pins" / f"{name}.txt"
    digest = hashlib.sha256(pins.read_bytes() + sys.version.encode()).hexdigest()[:16]
    folder = ROOT / "var" / "model-servers" / f"{name}-{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "installed").exists():
            subprocess.run(python("-m", "venv", "--clear", str(folder / "venv")), check=True, timeout=INSTALL_SECONDS)
            # Without dependencies: the file has all of those that the server needs.
            command = [folder / "venv/bin/pip", "install", "-q", "--no-deps", "--no-compile", "-r", pins]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
            except subprocess.TimeoutExpired:
                pytest.skip(f"pip did not install {pins.name} in {INSTALL_SECONDS} s")
            if done.returncode:
                missing = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
                pytest.skip(f"pip cannot install {pins.name}: {' '.join(missing)}")
            (folder / "installed").touch()
    return folder / "venv/bin"


@contextmanager
def running(name: str, command: Sequence[str], url: str, **environment: str) -> Iterator[None]:
    """The process, from the moment at which ``url`` answers."""
    folder = temporary_directory(f"{name}-")
    # The servers connect to loopback only, and not to the services of the tests.
    left_out = ("_proxy", "database_url", "redis_url")
    variables = {key: value for key, value in os.environ.items() if not key.lower().endswith(left_out)}
    process = Process(name, command, log=folder / "log", environment=variables | environment, directory=folder)
    process.start()
    http = requests.Session()
    http.trust_env = False

    def answers() -> bool:
        process.check()
        try:
            return http.get(url, timeout=5).ok
        except requests.RequestException:
            return False

    try:
        wait_for(answers, START_SECONDS, f"the start of {name}", interval=0.5)
        yield
    finally:
        process.kill()
        remove_directory(folder)


@contextmanager
def llama_server() -> Iterator[str]:
    """The address of a llama-server with real weights and a window of CONTEXT_TOKENS."""
    programs, port = environment_of("llama"), free_port()
    command = [str(programs / "python"), str(HERE / "llama_server.py"), str(port), str(CONTEXT_TOKENS)]
    with running("llama-server", command, f"http://127.0.0.1:{port}/health"):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def litellm_proxy(upstream: str) -> Iterator[tuple[str, str]]:
    """The address of LiteLLM's proxy, and its key. ``mock-…`` are its own mock answers and mock errors; other models
    are those of the server ``upstream``, to whose protocol the proxy translates.
    """
    programs, port, key = environment_of("litellm"), free_port(), f"sk-{secrets.token_hex(24)}"
    mocks = {
        "mock-plain": "Hello from LiteLLM.",
        "mock-overflow": "litellm.ContextWindowExceededError",
        "mock-limited": "litellm.RateLimitError",
        "mock-broken": "litellm.InternalServerError",
    }
    wishes = {
        "plain": "text=Hello from the server behind it.",
        "tool": 'call=calculate&args={"expression": "6*7"}',
        "thinker": 'reason=Let me think.&call=calculate&args={"expression": "6*7"}',
        "uncounted": "text=Hello&usage=0",
        "limited": "status=429",
        "broken": "status=503",
    }
    models: dict[str, dict[str, Any]] = {
        name: {"model": "openai/gpt-4o-mini", "api_key": "sk-none", "mock_response": answer}
        for name, answer in mocks.items()
    }
    models |= {
        name: {"model": f"openai/{wish}", "api_key": "sk-upstream", "api_base": f"{upstream}/v1"}
        for name, wish in wishes.items()
    }
    settings = {
        "model_list": [{"model_name": name, "litellm_params": parameters} for name, parameters in models.items()],
        "general_settings": {"master_key": key},
        "litellm_settings": {"num_retries": 0},
        "router_settings": {"num_retries": 0, "disable_cooldowns": True},
    }
    folder = temporary_directory("litellm-settings-")
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    options = ["--config", str(folder / "config.yaml"), "--host", "127.0.0.1", "--port", str(port)]
    command = [str(programs / "litellm"), *options, "--telemetry", "False"]
    url = f"http://127.0.0.1:{port}"
    try:
        with running("litellm", command, f"{url}/health/liveliness", LITELLM_LOCAL_MODEL_COST_MAP="True"):
            yield url, key
    finally:
        remove_directory(folder)
