"""The command on a file with a given text."""

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command

from tests import factories

VARIABLES = {
    "LOCAL_KEY": "sk-canary-of-the-key",
    "WEATHER_KEY": "canary-of-the-header",
    "WEATHER_SECRET": "whsec_Y2FuYXJ5LW9mLXRoZS1zaWduaW5nLXNlY3JldA==",
    "HOOK_SECRET": "c0ffee" * 10 + "cafe",
}
# The example of the interface, with every table.
EXAMPLE = """\
providers:
  - {name: local, kind: openai, baseUrl: "http://127.0.0.1:11434/v1", apiKey: "${LOCAL_KEY}", maxConcurrent: 8}
models:
  - name: llama
    displayName: Llama
    provider: local
    providerModel: llama3.2
    inputPrice: 0.5
    outputPrice: 1.5
    cachedInputPrice: 0.05
    providerCostPercent: 62.5
    contextTokens: 8192
    maxOutputTokens: 1024
    parameters: {temperature: 0.2}
    dialect: {maxTokensField: max_tokens}
    fallbacks: [demo]
    isDefault: true
tools:
  - name: get_weather
    displayName: Weather
    description: The weather of a city today.
    nodeType: http
    url: https://tools.example.com/weather
    inputSchema: {type: object, properties: {city: {type: string}}, required: [city]}
    price: 0.5
    providerCostPercent: 0
    approval: threshold
    timeoutSeconds: 30
    repeatable: true
    headers: {Authorization: "Bearer ${WEATHER_KEY}"}
    signingSecret: ${WEATHER_SECRET}
agents:
  - name: support
    displayName: Support
    description: Answers customers.
    instructions: |
      You are the support agent of Example.
    model: llama
    tools: [get_weather, ask_user]
    creditApprovalThreshold: 5
    maxCredits: 20
installationEndpoint: {url: "http://127.0.0.1:9/hooks", secret: "${HOOK_SECRET}"}
"""


class Command:
    """``manage.py catalogue``. ``failed``: whether the last call exited with 1; ``said``: what it printed."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "catalogue.yaml"
        self.failed = False

    def __call__(self, *arguments: str) -> str:
        out = io.StringIO()
        try:
            call_command("catalogue", *arguments, stdout=out)
            self.failed = False
        except CommandError as error:
            self.failed = True
            out.write(str(error))
        return out.getvalue()

    def apply(self, text: str | bytes, *options: str) -> str:
        self.path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return self("apply", str(self.path), *options)

    def applied(self, text: str, *options: str) -> str:
        said = self.apply(text, *options)
        assert not self.failed, said
        return said


@pytest.fixture
def command(db: None, tmp_path: Path) -> Command:
    return Command(tmp_path)


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def shown() -> Callable[[str], dict[str, dict]]:
    """The items of a list of the API by name, as an app sees them."""
    client = factories.session_client(factories.UserFactory())
    return lambda path: {item["name"]: item for item in client.get(f"/api/v1/{path}").json()["items"]}
