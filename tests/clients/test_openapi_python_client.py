"""A Python client generated from the committed schema. It performs a run on both surfaces."""

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

AGENT = """\
agents:
  - name: weather
    displayName: Weather
    model: demo
    tools: []
    outputSchema: {type: object, properties: {sky: {type: string}}, required: [sky]}
"""


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

    def of_surface(name: str) -> Any:
        """A model of one surface's operation."""
        return getattr(models, f"{surface.title()}{name}")

    yield SimpleNamespace(call=call, models=models, of_surface=of_surface)
    client.get_httpx_client().close()


def test_the_client_completes_a_run(api: Any) -> None:
    models = api.models
    chat = api.call("chats", "chats_create", body=models.ChatInputRequest(title="Generated"))
    assert isinstance(chat, models.Chat)
    body = models.RunInputRequest(
        message='/call draw_chart {"title": "T", "series": [1, 2]}\n/call calculate {"expression": "6*7"}\n/say done',
        max_credits=20,
        metadata=models.RunInputRequestMetadataType0.from_dict({"order": "A-4"}),
    )
    run = api.call("chats", "chats_runs_create", chat.id, body=body)
    assert (run.status, run.pending_waitpoint) == ("queued", None)
    run = until(lambda: (now := api.call("runs", "runs_retrieve", run.id)).status == "waiting" and now)
    question = run.pending_waitpoint
    assert isinstance(question, models.Waitpoint)
    assert isinstance(question.request_payload, models.CreditApprovalQuestion)
    assert question.request_payload.estimated_credits == 12
    assert question.request_payload.input_.to_dict() == {"title": "T", "series": [1, 2]}
    kind = models.CreditApprovalAnswerKindEnum.CREDIT_APPROVAL
    answer = models.CreditApprovalAnswerRequest(kind=kind, approved=False, reason="Too dear.")
    resolved = api.call("waitpoints", "waitpoints_respond", question.id, body=answer)
    assert (resolved.resolved_payload.approved, resolved.resolved_payload.reason) == (False, "Too dear.")
    run = until(lambda: (now := api.call("runs", "runs_retrieve", run.id)).status == "completed" and now)
    refused, made = run.tool_invocations
    assert (refused.status, refused.id) == ("REFUSED", question.request_payload.tool_invocation_id)
    assert (made.status, made.result, made.credit_used) == ("COMPLETED", "42", 0.1)
    assert (run.answer, run.finish_reason, run.usage.turns) == ("done", "stop", 2)
    assert run.metadata.to_dict() == {"order": "A-4"}
    newest_first = api.of_surface("ChatsMessagesListOrder")("desc")
    messages = api.call("chats", "chats_messages_list", chat.id, order=newest_first, run_id=run.id).items
    assert [message.role for message in messages] == ["assistant", "user"]
    assert api.call("chats", "messages_retrieve", messages[0].id).content == "done"
    statuses = [api.of_surface("RunsListStatusItem")(status) for status in ("completed", "failed")]
    pairs = api.of_surface("RunsListMetadata").from_dict({"metadata.order": "A-4"})
    listed = api.call("runs", "runs_list", status=statuses, metadata=pairs, created_after=chat.created_at).items
    assert [each.id for each in listed] == [run.id]


def test_the_client_starts_a_run_with_an_agent(api: Any, stack: Stack, tmp_path: Path) -> None:
    file = tmp_path / "catalogue.yaml"
    file.write_text(AGENT, encoding="utf-8")
    stack.manage("catalogue", "apply", str(file))
    found = until(lambda: [agent for agent in api.call("agents", "agents_list").items if agent.name == "weather"])
    (agent,) = found
    assert (agent.display_name, agent.version, agent.model, agent.tools) == ("Weather", 1, "demo", [])
    chat = api.call("chats", "chats_create", body=api.models.ChatInputRequest())
    body = api.models.RunInputRequest(message='/call submit_output {"sky": "blue"}', agent="weather")
    run = api.call("chats", "chats_runs_create", chat.id, body=body)
    assert run.agent == "weather@1"
    run = until(lambda: (now := api.call("runs", "runs_retrieve", run.id)).status == "completed" and now)
    assert (run.agent, run.output.to_dict(), run.finish_reason) == ("weather@1", {"sky": "blue"}, "stop")
    (listed,) = api.call("runs", "runs_list", agent="weather", limit=1).items
    assert listed.agent == "weather@1"


def test_the_client_parses_errors_as_models(api: Any) -> None:
    missing = api.call("runs", "runs_retrieve", "run_1")
    assert isinstance(missing, api.models.ApiError)
    assert missing.error.code == "NOT_FOUND"


def test_credits_and_catalogue(api: Any) -> None:
    account = api.call("credits_", "me_credits_retrieve")
    assert set(account.to_dict()) == {"balance", "held", "available", "expiring"}
    assert "calculate" in [tool.name for tool in api.call("tools", "tools_list").items]
