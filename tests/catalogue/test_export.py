"""``manage.py catalogue export``: a file without secrets that makes the same catalogue elsewhere."""

import re
import stat

import pytest
from cryptography.fernet import Fernet
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from runs import catalogue
from runs.catalogue import agents, file
from runs.catalogue.yaml import parse
from runs.models import Agent, AgentModel, AgentVersion, Provider, Tool
from tests import factories
from tests.catalogue.conftest import EXAMPLE, VARIABLES
from tests.tiers import examples
from webhooks import services
from webhooks.models import Endpoint

ODD = [
    "${HOME} $${A} $1",
    "a\nb\n",
    "\n a\n\n  b",
    "é 😀 \u2028 \x85",
    "'\"\\",
    "no",
    "1.0",
    "null",
    "- a: b #c",
    "\t|",
]


def empty(*, seeded: bool = True) -> None:
    """An installation without any row of a catalogue, or with those of a new one."""
    for table in (AgentVersion, Agent, Endpoint, AgentModel, Provider, Tool):
        table._default_manager.all().delete()
    if seeded:
        factories.seed_catalogue()


def fill() -> None:
    """A catalogue in which every field has a value of its own somewhere."""
    empty()
    local = Provider.objects.create(
        name="local 1",
        kind="openai_responses",
        base_url="http://127.0.0.1:1/v1?a=${b}",
        api_key="sk-canary",
        headers='{"X-B": "canary", "x_b": "canary ${a}"}',
        max_concurrent=3,
        requests_per_minute=7,
    )
    Provider.objects.create(name="local_1", kind="demo", api_key="canary", enabled=False)
    AgentModel.objects.filter(name="demo").update(is_default=False)
    for index, text in enumerate(ODD):
        AgentModel.objects.create(
            name=f"m{index} {text.strip()}",
            display_name=text.strip() or "-",
            provider=local,
            provider_model=text,
            price_in=index,
            price_out=10**15 - index,
            price_cached_in=123_456,
            price_cache_write=0,
            provider_cost_percent=66.67,
            context_tokens=5000,
            max_output_tokens=4,
            parameters={"temperature": 0.1, "stop": [text], "extra": {"b": {text: [1, 1.5, None, True]}, "a": -1}},
            dialect={"parallelToolCalls": None, "streamOptions": False},
            fallbacks=["demo", "deleted"],
            is_default=index == 0,
            enabled=index > 0,
        )
        Tool.objects.create(
            name=f"t{index}",
            display_name="T",
            description=text,
            node_type="mcp",
            url="http://127.0.0.1:1/mcp",
            remote_name=text,
            input_schema={"type": "object", "properties": {text: {"description": text, "maximum": 1e20}}},
            price=1,
            provider_cost_percent=0,
            approval="always",
            timeout_seconds=0.5,
            repeatable=True,
            secret_headers='{"Authorization": "Bearer canary"}',
            signing_secret="Y2FuYXJ5",
            enabled=False,
        )
        agents.save(
            f"a{index}",
            display_name=text.strip() or "-",
            description=text,
            instructions=text * 2,
            model=f"m{index} {text.strip()}",
            tools=[f"t{index}", "calculate"],
            parameters={"seed": 1},
            credit_approval_threshold=0,
            max_credits=1,
            output_schema={"type": "object", "properties": {text: {"const": text}}},
        )
    agents.save("plain", display_name="plain", tools=[], enabled=False)
    Tool.objects.filter(name="draw_chart").update(price=5, description="Draws.", enabled=False)
    services.register(services.INSTALLATION, "http://127.0.0.1:9/hook?token=${a}", rotate=False, extended=True)
    services.change(services.INSTALLATION, enabled=False)


def set_variables(text: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Set those that the comment at the top names."""
    names = re.findall(r"^#   (\w+)$", text, re.MULTILINE)
    for name in names:
        monkeypatch.setenv(name, "ab" * 32)
    return names


@pytest.mark.parametrize("seeded", [True, False])
def test_an_exported_catalogue_is_the_same_elsewhere(command, monkeypatch, seeded):
    fill()
    text = command("export")
    assert "canary" not in text
    assert Endpoint.objects.get().secret not in text
    names = set_variables(text, monkeypatch)
    assert names[:4] == [
        "PROVIDER_LOCAL_1_API_KEY",
        "PROVIDER_LOCAL_1_HEADER_X_B",
        "PROVIDER_LOCAL_1_HEADER_X_B_2",
        "PROVIDER_LOCAL_1_API_KEY_2",
    ]
    assert {"TOOL_T0_HEADER_AUTHORIZATION", "TOOL_T0_SIGNING_SECRET", "INSTALLATION_ENDPOINT_SECRET"} < set(names)
    assert {text.count(f"${{{name}}}\n") for name in names} == {1}
    empty(seeded=seeded)
    command.applied(text)
    assert command("export") == text
    assert "is as" in command.applied(text)
    assert "is as" in command.applied(text, "--prune")
    model = AgentModel.objects.get(name__startswith="m1 ")
    assert (model.provider_model, model.parameters["stop"]) == (ODD[1], [ODD[1]])
    assert (model.price_in, model.price_out) == (1, 10**15 - 1)
    assert catalogue.find_agent("a1").instructions == ODD[1] * 2


def test_a_new_installation_is_exported_and_comes_back(command):
    text = command("export")
    assert "$" not in text
    assert set(parse(text.encode(), depth=10)[0]) == {"providers", "models", "tools"}
    assert "is as" in command.applied(text)
    empty(seeded=False)
    command.applied(text)
    assert command("export") == text


def test_the_example_comes_back(command, monkeypatch):
    command.applied(EXAMPLE)
    text = command("export", str(command.path))
    assert text == ""
    text = command.path.read_text()
    assert stat.S_IMODE(command.path.stat().st_mode) & 0o022 == 0
    assert [value for value in VARIABLES.values() if value in text] == []
    set_variables(text, monkeypatch)
    empty()
    command("apply", str(command.path))
    assert command("export") == text
    command("export", str(command.path.parent))
    assert command.failed


def test_deleted_tools_and_fallbacks_are_left_out(command):
    agents.save("a", display_name="a", tools=["draw_chart", "calculate"])
    AgentModel.objects.filter(name="demo").update(fallbacks=["gone"])
    Tool.objects.filter(name="draw_chart").delete()
    text = command("export")
    empty()
    command.applied(text)
    assert catalogue.find_agent("a").tools == ["calculate"]


ADDRESSES = """\
providers: [{name: p, kind: openai, baseUrl: "https://${HOST}/v1/${TOKEN}?a=$${b}[*]"}]
tools: [{name: t, description: d, nodeType: http, url: "https://tools.example.com/${TOKEN}", price: 1}]
"""


def test_a_variable_of_an_address_stays_one(command, monkeypatch):
    monkeypatch.setenv("HOST", "models.example.com")
    monkeypatch.setenv("TOKEN", "canary-1")
    said = command.applied(ADDRESSES)
    assert Provider.objects.get(name="p").base_url == "https://models.example.com/v1/canary-1?a=${b}[*]"
    text = command("export")
    assert "baseUrl: https://${HOST}/v1/${TOKEN}?a=$${b}[*]\n" in text
    assert "url: https://tools.example.com/${TOKEN}\n" in text
    assert text.partition("providers:")[0].count("TOKEN") == 1
    empty()
    said += command.applied(text)
    assert command("export") == text
    monkeypatch.setenv("TOKEN", "canary-2")
    said += command.apply(text, "--check") + command.applied(text)
    assert "  url: changed" in said
    assert "is as" in command.applied(text)
    assert command("export") == text
    # The next address is no secret, the present one is.
    said += command.applied(ADDRESSES.replace("${TOKEN}", "open").replace("${HOST}", "h.example.com"))
    assert "canary" not in said
    plain = command("export")
    assert "url: https://tools.example.com/open\n" in plain
    assert "TOKEN" not in plain
    # Nor is one that staff write in the admin afterwards.
    command.applied(text)
    Tool.objects.filter(name="t").update(url="https://other.example.com/")
    assert "url: https://other.example.com/\n" in command("export")
    assert "  url: changed" in command.applied(text)


def test_a_secret_that_becomes_a_variable_is_not_shown(command, monkeypatch):
    """Its value stays, so nothing else would change."""
    monkeypatch.setenv("HOST", "models.example.com")
    monkeypatch.setenv("TOKEN", "canary-1")
    command.applied(ADDRESSES.replace("${TOKEN}", "canary-1"))
    said = command.applied(ADDRESSES)
    assert said.count(": changed") == 4
    assert "canary" not in said + command("export")
    assert "is as" in command.applied(ADDRESSES)


def test_the_path_of_the_installation_endpoint_is_a_variable(command, monkeypatch):
    """For many receivers it is the credential."""
    services.register(services.INSTALLATION, "http://127.0.0.1:9/hook/canary?token=canary", rotate=False, extended=True)
    text = command("export")
    assert "url: http://127.0.0.1:9/${INSTALLATION_ENDPOINT_PATH}\n" in text
    assert "canary" not in text
    empty()
    set_variables(text, monkeypatch)
    monkeypatch.setenv("INSTALLATION_ENDPOINT_PATH", "hook/canary?token=canary")
    said = command.applied(text)
    assert services.endpoint_of(services.INSTALLATION).url == "http://127.0.0.1:9/hook/canary?token=canary"
    assert "canary" not in said
    assert command("export") == text
    for url in ("http://127.0.0.1:9", "http://127.0.0.1:9/"):
        command.applied(f'installationEndpoint: {{url: "{url}"}}')
        assert f"url: {url}\n" in command("export")


def test_secrets_that_no_key_decrypts(command, settings):
    Provider.objects.filter(name="openai").update(api_key="sk")
    services.register(services.INSTALLATION, "http://127.0.0.1:9/", rotate=True, extended=True)
    settings.ENCRYPTION_KEYS = [Fernet.generate_key().decode()]
    text = command("export")
    assert "apiKey: ${PROVIDER_OPENAI_API_KEY}" in text
    assert "secret: ${INSTALLATION_ENDPOINT_SECRET}" in text
    Provider.objects.filter(name="openai").update(headers='{"A": "b"}')
    settings.ENCRYPTION_KEYS = [Fernet.generate_key().decode()]
    assert command("export") == "No key of ENCRYPTION_KEYS decrypts the headers of openai."
    assert command.failed


TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)


@hypothesis_settings(
    max_examples=examples(25),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(TEXTS, TEXTS, st.dictionaries(TEXTS, st.none() | st.booleans() | TEXTS | st.integers(-5, 5), max_size=3))
def test_any_text_comes_back(db, instructions, description, schema):
    agents.save("a", display_name="a", description=description, instructions=instructions)
    Tool.objects.filter(name="calculate").update(description=description or "d", input_schema={"enum": [schema]})
    text = file.export()
    empty()
    file.apply("x", text.encode())
    assert file.export() == text
    assert catalogue.find_agent("a").instructions == instructions
