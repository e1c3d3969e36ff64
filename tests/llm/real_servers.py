"""Model servers of other projects, as processes, with the packages that ``pins`` names."""

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests
import yaml

from tests.pinned import installed
from tests.stack.process import Process, free_port, remove_directory, temporary_directory, wait_for

HERE = Path(__file__).resolve().parent
START_SECONDS = 150
CONTEXT_TOKENS = 1024


def programs_of(name: str) -> Path:
    # Without dependencies: the file has all of those that the server needs.
    return installed("model-servers", HERE / "pins" / f"{name}.txt", "--no-deps")


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
    programs, port = programs_of("llama"), free_port()
    command = [str(programs / "python"), str(HERE / "llama_server.py"), str(port), str(CONTEXT_TOKENS)]
    with running("llama-server", command, f"http://127.0.0.1:{port}/health"):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def litellm_proxy(upstream: str) -> Iterator[tuple[str, str]]:
    """The address of LiteLLM's proxy, and its key. ``mock-…`` are its own mock answers and mock errors; other models
    are those of the server ``upstream``, to whose protocol the proxy translates.
    """
    programs, port, key = programs_of("litellm"), free_port(), f"sk-{secrets.token_hex(24)}"
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
