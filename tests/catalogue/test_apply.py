"""``manage.py catalogue apply``: what a file changes, what it leaves alone, and what it says about it."""

import logging
from decimal import Decimal

import pytest
from cryptography.fernet import Fernet

from runs import catalogue
from runs.catalogue import file
from runs.catalogue.definitions import Server
from runs.models import AgentModel, AgentVersion, Provider, Tool
from runs.tools import builtin
from tests.catalogue.conftest import EXAMPLE, VARIABLES
from tests.threads import side_by_side
from tests.webhooks.conftest import deliver, emit
from tests.webhooks.receiver import receiving
from webhooks import services, signing
from webhooks.models import Endpoint

LLAMA = "models: [{name: llama, provider: demo, providerModel: demo, inputPrice: 1, outputPrice: 2%s}]"


def stored() -> list[object]:
    """All rows with their secrets."""
    tables = (Provider, AgentModel, Tool, AgentVersion, Endpoint)
    return [list(table._default_manager.order_by("pk").values()) for table in tables]


def test_the_example_is_applied(command, shown):
    command.applied(EXAMPLE)
    models = shown("models")
    assert models["llama"] == {
        "name": "llama",
        "displayName": "Llama",
        "provider": "local",
        "inputPrice": 0.5,
        "outputPrice": 1.5,
        "cachedInputPrice": 0.05,
        "contextTokens": 8192,
        "maxOutputTokens": 1024,
        "isDefault": True,
        "typicalCredits": None,
    }
    assert [name for name, model in models.items() if model["isDefault"]] == ["llama"]
    weather = shown("tools")["get_weather"]
    assert (weather["nodeType"], weather["price"], weather["inputSchema"]["required"]) == ("http", 0.5, ["city"])
    provider = Server.from_row(Provider.objects.get(name="local"))
    assert (provider.base_url, provider.api_key, provider.max_concurrent) == (
        "http://127.0.0.1:11434/v1",
        VARIABLES["LOCAL_KEY"],
        8,
    )
    assert AgentModel.objects.get(name="llama").provider_cost_percent == 62.5
    assert Tool.objects.get(name="get_weather").provider_cost_percent == 0
    model = catalogue.read().model("llama")
    assert (dict(model.parameters), model.dialect.max_tokens_field) == ({"temperature": Decimal("0.2")}, "max_tokens")
    assert catalogue.read().chain("llama", None)[1].name == "demo"
    tool = catalogue.read().tools["get_weather"]
    assert tool.secret_headers == {"Authorization": f"Bearer {VARIABLES['WEATHER_KEY']}"}
    assert (tool.signing_secret, tool.timeout_seconds, tool.repeatable) == (VARIABLES["WEATHER_SECRET"][6:], 30, True)
    agent = catalogue.find_agent("support")
    assert (agent.instructions, agent.model, agent.tools) == (
        "You are the support agent of Example.\n",
        "llama",
        ["get_weather", "ask_user"],
    )
    assert (agent.credit_approval_threshold, agent.max_credits) == (5_000_000, 20_000_000)
    endpoint = services.endpoint_of(services.INSTALLATION)
    assert (endpoint.url, endpoint.secret) == ("http://127.0.0.1:9/hooks", VARIABLES["HOOK_SECRET"])
    assert endpoint.enabled
    assert endpoint.extended_events


def test_a_new_default_replaces_one_that_changes_too(command, shown):
    demo = "  - {name: demo, provider: demo, providerModel: demo, inputPrice: 2, outputPrice: 2}\n"
    command.applied(EXAMPLE.replace("    isDefault: true\n", f"    isDefault: true\n{demo}"))
    assert [name for name, model in shown("models").items() if model["isDefault"]] == ["llama"]
    assert shown("models")["demo"]["inputPrice"] == 2


def test_a_second_apply_changes_nothing(command):
    command.applied(EXAMPLE)
    before = stored()
    assert command.applied(EXAMPLE).startswith("The catalogue is as")
    assert "differs" not in command.applied(EXAMPLE, "--check")
    assert stored() == before
    assert AgentVersion.objects.count() == 1


def test_check_shows_the_difference_and_changes_nothing(command, caplog):
    before = stored()
    said = command.apply(EXAMPLE, "--check")
    assert command.failed
    for line in ("providers.local: added", "  apiKey: changed", "  inputPrice: 0.5", "  isDefault: true"):
        assert line in said.splitlines()
    assert stored() == before
    command.applied(EXAMPLE)
    text = EXAMPLE.replace("0.05", "0.06").replace("Example.\n", "Example.\n      Be kind.\n")
    text = text.replace("temperature: 0.2", "temperature: 0.3").replace("Bearer ${W", "Basic ${W")
    before = stored()
    said = command.apply(text, "--check")
    assert stored() == before
    assert said.partition("Warning")[0].splitlines() == [
        "models.llama: changed",
        "  cachedInputPrice: 0.05 → 0.06",
        '  parameters: {"temperature":0.2} → {"temperature":0.3}',
        "tools.get_weather: changed",
        "  headers: changed",
        "agents.support: changed",
        "  instructions:",
        "      You are the support agent of Example.",
        "    + Be kind.",
        f"The catalogue differs from {command.path}.",
    ]


def test_nothing_that_is_said_or_logged_has_a_secret(command, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    said = command.apply(EXAMPLE, "--check") + command.apply(EXAMPLE)
    for name in VARIABLES:
        monkeypatch.setenv(name, VARIABLES[name][:-4] + "d00=" if "SECRET" in name else "other-canary")
    monkeypatch.setenv("HOOK_SECRET", "f00d" * 16)
    said += command.apply(EXAMPLE, "--check") + command.apply(EXAMPLE) + command("export")
    monkeypatch.setenv("WEATHER_KEY", "canary\n")
    monkeypatch.setenv("HOOK_SECRET", "canary")
    said += command.apply(EXAMPLE)
    assert command.failed
    assert "apiKey: changed" in said
    for part in ("canary", "c0ffee", "f00d", "Y2FuYXJ5"):
        assert part not in said + caplog.text


def test_one_line_of_the_log_names_what_changed(command, caplog):
    caplog.set_level(logging.INFO)
    command.applied(EXAMPLE)
    command.applied(EXAMPLE.replace("1024", "2048"))
    command.applied(EXAMPLE.replace("1024", "2048"))
    command.apply(EXAMPLE, "--check")
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("runs.catalogue")]
    assert len(lines) == 2
    assert lines[1] == "the catalogue file changed models.llama"


def test_what_the_file_does_not_name_is_left_alone(command, shown):
    command.applied(EXAMPLE)
    Tool.objects.filter(name="get_weather").update(price=7)
    command.applied("providers: []\nagents: []")
    assert shown("models")["llama"]["isDefault"]
    assert shown("tools")["get_weather"]["price"] == 0.000007
    assert catalogue.find_agent("support") is not None


def test_a_field_without_a_value_has_its_default_but_secrets_stay(command):
    command.applied(EXAMPLE)
    command.applied(
        "providers: [{name: local, kind: openai, baseUrl: 'http://127.0.0.1:11434/'}]\n"
        "models: [{name: llama, provider: local, providerModel: m, inputPrice: 1, outputPrice: 1}]\n"
        "tools: [{name: get_weather, description: d, nodeType: http, url: 'https://tools.example.com/', price: 0}]\n"
        "agents: [{name: support}]\n"
        'installationEndpoint: {url: "http://127.0.0.1:9/hooks"}\n'
    )
    provider = Provider.objects.get(name="local")
    assert (provider.max_concurrent, provider.api_key) == (None, VARIABLES["LOCAL_KEY"])
    model = AgentModel.objects.get(name="llama")
    assert (model.display_name, model.context_tokens, model.fallbacks) == ("llama", 128_000, [])
    assert (model.price_cached_in, model.parameters, model.dialect) == (None, {}, {})
    assert model.is_default  # no other model is
    tool = Tool.objects.get(name="get_weather")
    assert (tool.input_schema, tool.timeout_seconds, tool.repeatable) == ({}, None, False)
    assert tool.signing_secret == VARIABLES["WEATHER_SECRET"]
    agent = catalogue.find_agent("support")
    assert (agent.number, agent.instructions, agent.model, agent.tools) == (2, "", None, None)
    assert services.endpoint_of(services.INSTALLATION).secret == VARIABLES["HOOK_SECRET"]
    said = command.applied(
        "providers: [{name: local, kind: openai, apiKey: null}]\n"
        "tools: [{name: get_weather, description: d, nodeType: http, url: 'http://127.0.0.1/', price: 0,"
        ' headers: {}, signingSecret: ""}]\n'
    )
    assert "apiKey: changed" in said
    assert Provider.objects.get(name="local").api_key is None
    tool = Tool.objects.get(name="get_weather")
    assert (tool.secret_headers, tool.signing_secret) == (None, None)


def test_secrets_stay_only_with_their_server(command):
    command.applied(EXAMPLE)
    moved = (
        "providers: [{name: local, kind: openai, baseUrl: 'http://127.0.0.2:11434/v1'%s}]\n"
        "tools: [{name: get_weather, description: d, nodeType: http, url: 'http://127.0.0.1/', price: 0}]\n"
    )
    command.applied(moved % ", apiKey: '${LOCAL_KEY}'")
    provider, tool = Provider.objects.get(name="local"), Tool.objects.get(name="get_weather")
    assert provider.api_key == VARIABLES["LOCAL_KEY"]
    assert (provider.headers, tool.secret_headers, tool.signing_secret) == (None, None, None)
    command.applied(moved.replace("127.0.0.2", "127.0.0.3") % "")
    assert Provider.objects.get(name="local").api_key is None


def test_prune_disables_what_the_tables_do_not_list(command, shown):
    command.applied(EXAMPLE)
    command.applied("models: []\ntools: []\nagents: []", "--prune")
    assert shown("models").keys() == {"demo"}
    assert shown("tools").keys() == builtin.TOOLS.keys()
    assert shown("agents") == {}
    assert Provider.objects.get(name="local").enabled
    assert services.endpoint_of(services.INSTALLATION).enabled
    said = command.applied("providers: []\ninstallationEndpoint: null", "--prune")
    assert set(Provider.objects.filter(enabled=True).values_list("name", flat=True)) == {"demo"}
    assert not services.endpoint_of(services.INSTALLATION).enabled
    assert said.count("enabled: true → false") == 4
    assert "is as" in command.applied("models: []\nproviders: []\ninstallationEndpoint:", "--prune")
    # The file is what counts: what it lists is enabled again.
    command.applied(EXAMPLE)
    assert "llama" in shown("models")
    assert "get_weather" in shown("tools")
    assert "support" in shown("agents")
    assert services.endpoint_of(services.INSTALLATION).enabled


@pytest.mark.parametrize("options", [["--check", "--prune"], ["--prune"]])
def test_who_uses_what_is_disabled_is_said(command, options):
    command.applied(EXAMPLE)
    said = command.apply("providers: [{name: openai, kind: openai, apiKey: k}]", *options)
    assert "Warning: No enabled model is the default: runs must name one." in said
    assert "Warning: agents.support cannot be used: its model llama is not offered." in said


def test_nothing_is_ever_deleted(command):
    command.applied(EXAMPLE)
    counts = [len(rows) for rows in stored()]
    command.applied("providers: []\nmodels: []\ntools: []\nagents: []\ninstallationEndpoint:", "--prune")
    assert [len(rows) for rows in stored()] == counts


def test_a_changed_agent_makes_one_version(command):
    command.applied(EXAMPLE)
    command.applied(EXAMPLE.replace("maxCredits: 20", "maxCredits: 30"))
    assert [version.number for version in AgentVersion.objects.all()] == [2, 1]
    command.applied(EXAMPLE.replace("maxCredits: 20", "maxCredits: 30").replace("Answers", "Helps"))
    assert AgentVersion.objects.count() == 2
    assert catalogue.find_agent("support@1").max_credits == 20_000_000


def test_the_order_of_an_agents_tools_is_not_a_difference_for_ever(command):
    command.applied(EXAMPLE)
    other = EXAMPLE.replace("get_weather, ask_user", "ask_user, get_weather")
    command.applied(other)
    assert "is as" in command.applied(other)


@pytest.mark.django_db(transaction=True)
def test_a_run_keeps_the_version_that_the_file_had(command, session):
    runs = []
    for text in (EXAMPLE, EXAMPLE.replace("model: llama", "model: demo")):
        command.applied(text)
        chat = session.post("/api/v1/chats", {}, format="json").json()["id"]
        body = {"message": "Hi", "agent": "support"}
        runs.append(session.post(f"/api/v1/chats/{chat}/runs", body, format="json").json())
    assert [run["agent"] for run in runs] == ["support@1", "support@2"]
    assert session.get(f"/api/v1/runs/{runs[0]['id']}").json()["agent"] == "support@1"


def test_a_new_secret_of_the_endpoint_has_a_grace_window(command, monkeypatch):
    command.applied(EXAMPLE)
    monkeypatch.setenv("HOOK_SECRET", "ab" * 32)
    assert "secret: changed" in command.applied(EXAMPLE)
    endpoint = services.endpoint_of(services.INSTALLATION)
    assert (endpoint.secret, endpoint.secondary_secret) == ("ab" * 32, VARIABLES["HOOK_SECRET"])
    assert Endpoint.objects.count() == 1
    command.applied(EXAMPLE.replace("hooks", "hooks2"))
    endpoint = services.endpoint_of(services.INSTALLATION)
    assert (endpoint.url, endpoint.secret) == ("http://127.0.0.1:9/hooks2", "ab" * 32)


def test_the_installation_endpoint_signs_with_the_secret_of_the_file(command, user):
    with receiving() as receiver:
        command.applied(EXAMPLE.replace("http://127.0.0.1:9/hooks", receiver.url))
        emit(user.pk, "agent.started", run_id="run_1", chat_id="chat_1")
        deliver()
    (request,) = receiver.requests
    headers = dict(request.headers)
    signing.verify(headers, request.body, VARIABLES["HOOK_SECRET"], int(headers["webhook-timestamp"]))


def test_an_address_is_not_looked_up_again(command, settings):
    command.applied(EXAMPLE)
    settings.OUTBOUND_ALLOW_PRIVATE = False
    command.applied(EXAMPLE)
    command.apply(EXAMPLE.replace("hooks", "hooks2"))
    assert command.failed


def test_a_lost_encryption_key_is_replaced_by_the_files_secrets(command, settings):
    command.applied(EXAMPLE)
    settings.ENCRYPTION_KEYS = [Fernet.generate_key().decode()]
    said = command.applied(EXAMPLE)
    for name in ("apiKey", "headers", "signingSecret", "secret"):
        assert f"  {name}: changed" in said
    assert Provider.objects.get(name="local").api_key == VARIABLES["LOCAL_KEY"]
    assert Tool.objects.get(name="get_weather").signing_secret == VARIABLES["WEATHER_SECRET"]
    assert services.endpoint_of(services.INSTALLATION).secret == VARIABLES["HOOK_SECRET"]
    assert "is as" in command.applied(EXAMPLE)


def test_a_secret_that_no_key_decrypts_stays_if_the_file_leaves_it_out(command, settings):
    Provider.objects.filter(name="openai").update(api_key="sk")
    keys, settings.ENCRYPTION_KEYS = settings.ENCRYPTION_KEYS, [Fernet.generate_key().decode()]
    command.applied("providers: [{name: openai, kind: openai, maxConcurrent: 3}]")
    settings.ENCRYPTION_KEYS = keys
    row = Provider.objects.get(name="openai")
    assert (row.api_key, row.max_concurrent) == ("sk", 3)


def test_the_value_of_a_variable_is_never_read_as_yaml(command, monkeypatch):
    odd = 'x", enabled: false, name: "y ${HOME} *a'
    monkeypatch.setenv("LOCAL_KEY", odd)
    command.applied('providers: [{name: local, kind: openai, apiKey: "a $${b} $c ${LOCAL_KEY}"}]')
    assert Provider.objects.get(name="local").api_key == f"a ${{b}} $c {odd}"


def test_an_address_may_have_a_variable_and_other_texts_have_none(command, monkeypatch):
    monkeypatch.setenv("HOST", "127.0.0.1")
    command.applied('providers: [{name: local, kind: openai, baseUrl: "http://${HOST}:1/v1"}]')
    assert Provider.objects.get(name="local").base_url == "http://127.0.0.1:1/v1"
    command.applied('agents: [{name: a, instructions: "Write ${HOST} and $${HOST}."}]')
    assert catalogue.find_agent("a").instructions == "Write ${HOST} and $${HOST}."


def test_a_built_in_tool_has_its_own_texts(command, shown):
    before = shown("tools")["draw_chart"]
    command.applied("tools: [{name: draw_chart, nodeType: builtin, price: 3, approval: never}]")
    assert shown("tools")["draw_chart"] == before | {"price": 3, "approval": "never"}


def test_fallbacks_may_be_a_circle(command, shown):
    model = "- {name: %s, provider: demo, providerModel: demo, inputPrice: 0, outputPrice: 0, fallbacks: [%s]}\n"
    command.applied("models:\n" + "".join(model % tuple(pair) for pair in ("ab", "bc", "ca")))
    assert [model.name for model in catalogue.read().chain("a", None)] == ["a", "b"]


def test_an_exact_price(command):
    command.applied(LLAMA % ", cachedInputPrice: 0.000001, cacheWritePrice: 999999999.999999")
    model = AgentModel.objects.get(name="llama")
    assert (model.price_cached_in, model.price_cache_write) == (1, 999999999999999)


def test_true_is_not_one(command):
    tool = "{name: t, description: d, nodeType: http, url: 'http://127.0.0.1/', price: 0, inputSchema: {default: %s}}"
    text = f"tools: [{tool}]"
    command.applied(text % "1")
    assert "→" in command.applied(text % "true")
    assert Tool.objects.get(name="t").input_schema == {"default": True}


@pytest.mark.parametrize("text", ["parameters: {extra: {a: %s}}", "outputSchema: {type: object, const: {a: %s}}"])
def test_true_is_not_one_in_an_agent(command, text):
    text = f"agents: [{{name: a, {text}}}]"
    command.applied(text % "1")
    assert "→" in command.applied(text % "true")
    assert "is as" in command.applied(text % "true")
    assert AgentVersion.objects.count() == 2


def test_what_cannot_be_used_yet_is_said(command, settings):
    settings.OPENAI_API_KEY = ""
    said = command.applied(
        "providers: [{name: openai, kind: openai}, {name: off, kind: demo, enabled: false}]\n"
        "models:\n"
        "- {name: m, provider: off, providerModel: x, inputPrice: 0, outputPrice: 0, isDefault: true}\n"
        "- {name: n, provider: openai, providerModel: x, inputPrice: 0, outputPrice: 0}"
    )
    assert "Warning: providers.openai cannot be used yet: Its key is missing: OPENAI_API_KEY." in said
    assert "Warning: No enabled model is the default" in said


def test_the_file_of_the_setting_is_the_default(command, settings, shown):
    settings.CATALOGUE_FILE = ""
    assert "no catalogue file" in command("apply")
    assert not command.failed
    command.path.write_text(EXAMPLE)
    settings.CATALOGUE_FILE = str(command.path)
    command("apply")
    assert "llama" in shown("models")
    settings.CATALOGUE_FILE = str(command.path.parent / "missing.yaml")
    assert "No such file" in command("apply")
    assert command.failed


@pytest.mark.django_db(transaction=True)
def test_of_several_at_once_one_changes_and_the_others_find_nothing_to_do():
    def apply(number: int) -> int:
        return len(file.apply("catalogue.yaml", EXAMPLE.encode()).changes)

    assert sorted(side_by_side(4, apply)) == [0, 0, 0, 5]
    assert (AgentVersion.objects.count(), Endpoint.objects.count()) == (1, 1)
