"""A Python client generated from the committed schema. It performs a run on both surfaces."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.driver import until
from tests.stack.process import ROOT, python
from tests.stack.stack import Stack

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Generate the client. Yields the name of its package, which can be imported."""
    folder: Path = tmp_path_factory.mktemp("generated")
    name = "agent_workflow_client"
    generate = python("-m", "openapi_python_client", "generate", "--path", str(ROOT / "docs" / "openapi.json"))
    # The generator runs tools, such as ruff, from the folder of the interpreter.
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    options = ["--meta", "none", "--output-path", str(folder / name), "--fail-on-warning"]
    done = subprocess.run([*generate, *options], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    sys.path.insert(0, str(folder))
    yield name
    sys.path.remove(str(folder))


@pytest.fixture(params=["session", "public"])
def api(stack: Stack, package: str, request: pytest.FixtureRequest) -> Any:
    """The generated client of one surface. ``api.call(tag, operation, …)`` returns the parsed model."""
    surface = request.param
    client_class = importlib.import_module(package).AuthenticatedClient
    models = importlib.import_module(f"{package}.models")
    token = stack.token("ada") if surface == "session" else stack.api_key("ada")
    client = client_class(base_url=stack.url, token=token, raise_on_unexpected_status=True)

    def call(tag: str, operation: str, *arguments: Any, **options: Any) -> Any:
        module = importlib.import_module(f"{package}.api.{tag}.{surface}_{operation}")
        return module.sync(*arguments, client=client, **options)

    yield SimpleNamespace(call=call, models=models)
    client.get_httpx_client().close()


def test_the_client_completes_a_run(api: Any) -> None:
    models = api.models
    chat = api.call("chats", "chats_create", body=models.ChatInputRequest(title="Generated"))
    assert isinstance(chat, models.Chat)
    body = models.RunInputRequest(
        message='/call draw_chart {"title": "T", "series": [1, 2]}\n/say done', max_credits=20
    )
    run = api.call("chats", "chats_runs_create", chat.id, body=body)
    assert (run.status, run.pending_waitpoint) == ("queued", None)
    run = until(lambda: (now := api.call("runs", "runs_retrieve", run.id)).status == "waiting" and now)
    question = run.pending_waitpoint
    assert isinstance(question, models.Waitpoint)
    assert isinstance(question.request_payload, models.CreditApprovalQuestion)
    assert question.request_payload.estimated_credits == 12
    answer = models.CreditApprovalAnswerRequest(kind=models.CreditApprovalAnswerKindEnum.CREDIT_APPROVAL, approved=True)
    resolved = api.call("waitpoints", "waitpoints_respond", question.id, body=answer)
    assert resolved.resolved_payload.approved is True
    run = until(lambda: (now := api.call("runs", "runs_retrieve", run.id)).status == "completed" and now)
    (invocation,) = run.tool_invocations
    assert (invocation.status, invocation.credit_used) == ("COMPLETED", 12)
    messages = api.call("chats", "chats_messages_list", chat.id).items
    assert [message.role for message in messages] == ["user", "assistant"]
    assert messages[-1].content == "done"


def test_the_client_parses_errors_as_models(api: Any) -> None:
    missing = api.call("runs", "runs_retrieve", "run_1")
    assert isinstance(missing, api.models.ApiError)
    assert missing.error.code == "NOT_FOUND"


def test_credits_and_catalogue(api: Any) -> None:
    account = api.call("credits_", "me_credits_retrieve")
    assert set(account.to_dict()) == {"balance", "held", "available"}
    assert "calculate" in [tool.name for tool in api.call("tools", "tools_list").items]
