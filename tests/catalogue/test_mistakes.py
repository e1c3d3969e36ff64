"""Mistakes in a catalogue file: each is named with its line and field, and none changes anything."""

import pytest

from runs.models import AgentModel, AgentVersion, Provider, Tool
from tests.catalogue.conftest import EXAMPLE
from tests.tiers import slow

PROVIDER = "providers:\n- name: p\n  kind: openai\n"
MODEL = "models:\n- name: m\n  provider: demo\n  providerModel: x\n  inputPrice: 1\n  outputPrice: 1\n"
TOOL = "tools:\n- name: t\n  description: d\n  nodeType: http\n  url: http://127.0.0.1/\n  price: 1\n"
AGENT = "agents:\n- name: a\n"
ENDPOINT = "installationEndpoint:\n  url: http://127.0.0.1:9/\n  secret: ${HOOK_SECRET}\n"
DEEP = "{a: " * 62 + "1" + "}" * 62


def counts() -> list[int]:
    return [table._default_manager.count() for table in (Provider, AgentModel, Tool, AgentVersion)]


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        # The form of the file.
        ("", "1: A mapping of providers, models, tools, agents, installationEndpoint is required."),
        ("- models", "1: A mapping of"),
        ("\nmodel: []", "2: model: Unknown field. Did you mean models?"),
        ("models: []\nmodels: []", "2: The key 'models' is there twice."),
        ("models:", "1: models: A list is required"),
        ("models: {}", "1: models: A list is required"),
        ("models: [1]", "1: models.(1): It must be a mapping."),
        ("models: [{}]", "1: models.(1).name: This field is required."),
        ("models: &a []\ntools: *a", "2: Aliases are not supported."),
        ("models:\n- !!python/object/apply:os.system [true]", "2: Tags are not supported."),
        ("models: [\n", "2: It is not valid YAML"),
        (b"models: []\n# \xff", "2: It is not valid UTF-8, or contains"),
        ("models: []\n# \0", "2: It is not valid UTF-8, or contains a control character."),
        (AGENT + '  instructions: "a\\0b"', "3: A text contains NUL."),
        ("models: []\ntools: " + "[" * 100, "2: It is nested more than 67 levels deep."),
        # Names and rows.
        (MODEL + "  inputprice: 2", "7: models.m.inputprice: Unknown field. Did you mean inputPrice?"),
        (MODEL + "- name: m", "7: models.m.provider: This field is required."),
        (PROVIDER + "- name: p\n  kind: demo", "4: providers.p.name: The name is there twice."),
        (PROVIDER.replace("p\n", "'p '\n"), "2: providers.p .name: It begins or ends with a blank."),
        (PROVIDER.replace("p\n", "p" * 65 + "\n", 1), ".name: Ensure this field has no more than 64 characters"),
        (MODEL.replace("m\n", "m" * 101 + "\n", 1), ".name: Ensure this field has no more than 100 characters"),
        (MODEL.replace("name: m", "name: 5"), "2: models.(1).name: A text is required. Put it in quotes."),
        (TOOL.replace("t\n", "a b\n", 1), "2: tools.a b.name: Use letters, digits, _ and - only"),
        (TOOL.replace("t\n", "model\n", 1), "2: tools.model: No tool can be named"),
        (TOOL.replace("t\n", "ask_user\n", 1), "4: tools.ask_user.nodeType: ask_user is built in."),
        (AGENT.replace("a\n", "a@1\n"), "2: agents.a@1.name: Use 1 to 64 letters, digits, _ and -."),
        # Values.
        (PROVIDER.replace("openai", "opneai"), "3: providers.p.kind: Use one of demo, openai, "),
        (PROVIDER + "  baseUrl: ftp://a/", "4: providers.p.baseUrl: Use an http(s) address without credentials."),
        (PROVIDER + "  baseUrl: http://u:p@a/", "4: providers.p.baseUrl: Use an http(s) address without credentials."),
        (PROVIDER + "  maxConcurrent: 0", "4: providers.p.maxConcurrent: Ensure this value is greater than or equal"),
        (PROVIDER + "  maxConcurrent: '8'", "4: providers.p.maxConcurrent: A valid integer is required."),
        (PROVIDER + "  maxConcurrent: 1.5", "4: providers.p.maxConcurrent: A valid integer is required."),
        (PROVIDER + "  enabled: yes", "4: providers.p.enabled: Must be a valid boolean."),
        (PROVIDER + "  apiKey: 12345", "4: providers.p.apiKey: A text is required. Put it in quotes."),
        (PROVIDER + "  headers: [a]", "4: providers.p.headers: A mapping of header names"),
        (
            PROVIDER + "  headers:\n    A: b\n    Host: c",
            "6: providers.p.headers: 'Host' is not a header that can be set",
        ),
        (MODEL.replace("outputPrice: 1", "outputPrice: -1"), "6: models.m.outputPrice: The number must be at least 0."),
        (MODEL.replace("outputPrice: 1", "outputPrice: .nan"), "6: models.m.outputPrice: A number is required."),
        (MODEL.replace("outputPrice: 1", "outputPrice: 1e400"), "6: It contains a number that is out of range."),
        (MODEL.replace("outputPrice: 1", "outputPrice: '1'"), "6: models.m.outputPrice: A number is required."),
        (MODEL.replace("outputPrice: 1", "outputPrice: true"), "6: models.m.outputPrice: The number must be a number."),
        (MODEL.replace("outputPrice: 1", "outputPrice: 1e300"), "6: models.m.outputPrice: The number must be at most"),
        (
            MODEL.replace("outputPrice: 1", "outputPrice: 1e-7"),
            "6: models.m.outputPrice: The number may have at most 6",
        ),
        (
            MODEL + "  contextTokens: 10",
            "7: models.m.contextTokens: Ensure this value is greater than or equal to 1000",
        ),
        (
            MODEL + "  contextTokens: 9223372036854775807",
            "7: models.m.contextTokens: Ensure this value is less than or equal to 2147483647",
        ),
        (MODEL + "  parameters: {temperature: 3}", "7: models.m.parameters: temperature must be a number from 0 to 2."),
        (MODEL + "  parameters: {temprature: 1}", "7: models.m.parameters: There is no 'temprature'"),
        (MODEL + "  parameters: []", "7: models.m.parameters: A mapping is required."),
        (MODEL + "  dialect: {maxTokens: a}", "7: models.m.dialect: There is no 'maxTokens'"),
        (MODEL + "  fallbacks: demo", "7: models.m.fallbacks: Expected a list of items"),
        (TOOL + "  inputSchema: {type: array}", "7: tools.t.inputSchema: The input schema's type must be object."),
        (TOOL + "  inputSchema: {properties: 1}", "7: tools.t.inputSchema: At properties: "),
        (TOOL + "  inputSchema: {pattern: '(?=a)'}", "7: tools.t.inputSchema: At pattern: "),
        (TOOL + f"  inputSchema: {DEEP}\n  x: 1", "8: tools.t.x: Unknown field."),
        (
            TOOL + "  providerCostPercent: 1001",
            "7: tools.t.providerCostPercent: Ensure this value is less than or equal to 1000.",
        ),
        (TOOL + "  timeoutSeconds: 0", "7: tools.t.timeoutSeconds: Ensure this value is greater than or equal to 0.1."),
        (TOOL + "  parkSeconds: 59", "7: tools.t.parkSeconds: Ensure this value is greater than or equal to 60."),
        (
            TOOL + "  parkSeconds: 2592001",
            "7: tools.t.parkSeconds: Ensure this value is less than or equal to 2592000.",
        ),
        (TOOL + "  approval: sometimes", "7: tools.t.approval: Use one of threshold, always, never."),
        (TOOL + "  signingSecret: '!'", "7: tools.t.signingSecret: A signing secret is base64"),
        (TOOL.replace("http\n", "builtin\n"), "4: tools.t.nodeType: The built-in tools are "),
        (TOOL.replace("http://127.0.0.1/", "''"), "5: tools.t.url: A tool of this type needs an http(s) address"),
        (AGENT + "  instructions: " + "x" * 100_001, "3: agents.a.instructions: Ensure this field has no more"),
        (AGENT + "  maxCredits: 0", "3: agents.a.maxCredits: The number must be at least 0.000001."),
        (AGENT + "  outputSchema: {type: array}", "3: agents.a.outputSchema: The schema's type must be object."),
        (AGENT + "  parameters: {topP: 2}", "3: agents.a.parameters: topP must be a number from 0 to 1."),
        (ENDPOINT.replace("http:", "ftp:"), "2: installationEndpoint.url: Use an http(s) address"),
        (ENDPOINT.replace("9/", "9/#a"), "2: installationEndpoint.url: The URL must not contain a fragment."),
        (ENDPOINT.replace("${HOOK_SECRET}", "hello"), "3: installationEndpoint.secret: Use 64 hexadecimal digits"),
        (ENDPOINT.replace("${HOOK_SECRET}", f"'!{'ab' * 32}'"), "3: installationEndpoint.secret: Use 64 hexadecimal"),
        (ENDPOINT.partition("  secret")[0], "2: installationEndpoint.secret: This field is required."),
        # Rows that others name.
        (MODEL.replace("demo", "dmeo"), "3: models.m.provider: There is no provider named dmeo."),
        (MODEL + "  fallbacks: [demo, m]", "7: models.m.fallbacks: There is no other model named m."),
        (MODEL + "  fallbacks: [gone]", "7: models.m.fallbacks: There is no other model named gone."),
        (MODEL + "  fallbacks: [demo, demo]", "7: models.m.fallbacks: At most 10 names, each once."),
        (AGENT + "  model: gone", "3: agents.a.model: There is no model named gone."),
        (AGENT + "  tools: [calculate, gone]", "3: agents.a.tools: There is no tool named gone."),
        # Variables.
        (PROVIDER + "  apiKey: ${NO_SUCH}", "4: providers.p.apiKey: The environment has no variable NO_SUCH, or it is"),
        (
            PROVIDER + "  headers:\n    A: b\n    B: ${NO_SUCH}",
            "6: providers.p.headers: The environment has no variable",
        ),
        (PROVIDER + "  apiKey: ${LOCAL_KEY", "4: providers.p.apiKey: Write ${VARIABLE}, or $${ for the text ${."),
        (PROVIDER + "  apiKey: ${}", "4: providers.p.apiKey: Write ${VARIABLE}, or $${ for the text ${."),
        (PROVIDER + "  apiKey: ${a b}", "4: providers.p.apiKey: Write ${VARIABLE}, or $${ for the text ${."),
    ],
)
def test_a_mistake_names_line_and_field_and_changes_nothing(command, text, mistake):
    before = counts()
    # What is right, and stands before the mistake, is not applied either.
    said = command.apply(text)
    assert command.failed
    assert f"{command.path}, line " in said
    assert mistake in said
    assert counts() == before


def test_the_last_mistake_undoes_the_whole_file(command):
    before = counts()
    said = command.apply(EXAMPLE.replace("get_weather, ask_user", "get_weather, gone"))
    assert said == f"{command.path}, line 39: agents.support.tools: There is no tool named gone."
    assert counts() == before


def test_all_mistakes_are_told_at_once(command):
    text = (
        EXAMPLE.replace("openai", "opneai")
        .replace("inputPrice: 0.5", "inputPrice: x")
        .replace("name: support", "nam: a")
    )
    lines = command.apply(text.replace("approval: threshold", "approval: no")).splitlines()
    places = [line.partition(": ")[2].partition(": ")[0] for line in lines]
    assert places == ["providers.local.kind", "models.llama.inputPrice", "tools.get_weather.approval", *places[3:]]
    assert set(places[3:]) == {"agents.(1).name", "agents.(1).nam"}


def test_many_mistakes_are_counted(command):
    lines = command.apply("models: [" + "1," * 1000 + "]").splitlines()
    assert len(lines) == 51
    assert lines[-1] == "… and more"


def test_names_of_the_file_do_not_control_the_terminal(command):
    said = command.apply('models: [{name: "\\e[2J\\n\\x9b", "\\e": 1}]')
    assert command.failed
    assert said.replace("\n", "").isprintable()


def test_the_second_default_is_a_mistake(command):
    text = MODEL + "  isDefault: true\n" + MODEL.partition("\n")[2].replace("m\n", "n\n", 1) + "  isDefault: true"
    assert "13: models.n.isDefault: Only one model can be the default; models.m is." in command.apply(text)


def test_a_secret_in_a_mistake_is_not_told(command, monkeypatch):
    monkeypatch.setenv("CANARY", "canary\x01" * 3)
    said = command.apply(
        PROVIDER + "  headers: {A: '${CANARY}'}\n" + TOOL + "  signingSecret: ${CANARY}\n"
        "installationEndpoint: {url: 'http://127.0.0.1:9/', secret: '${CANARY}'}"
    )
    assert len(said.splitlines()) == 3
    assert "canary" not in said


@pytest.mark.parametrize(
    "text",
    [
        b"#" * 10_000_000,
        *slow(
            b"a: [" + b"{a: 1}," * 14_000 + b"]",
            b"models: [" + b"{}," * 34_000 + b"]",
            b"tools: [{" + b"".join(b"a%d: 1," % number for number in range(10_000)) + b"}]",
        ),
        b"models: " + b"[" * 100_000,
        b"models: [{name: " + b"x" * 100_000 + b"}]",
        b"providers: [{name: p, kind: demo, apiKey: '" + b"${" * 50_000 + b"'}]",
    ],
    ids=["limit", "objects", "rows", "fields", "depth", "name", "variables"],
)
def test_a_large_file_with_mistakes_has_a_short_answer(command, text):
    said = command.apply(text)
    assert command.failed
    assert len(said) < 20_000


def test_the_limit_of_a_file_is_a_setting(command, settings):
    settings.CATALOGUE_MAX_BYTES = 100
    assert ", line 1: At most 100 bytes (CATALOGUE_MAX_BYTES)." in command.apply(EXAMPLE)
    assert "Is a directory" in command("apply", str(command.path.parent))


def test_a_file_that_disables_the_default_is_warned_of(command):
    said = command.applied(MODEL.replace("name: m", "name: demo") + "  enabled: false")
    assert "Warning: No enabled model is the default: runs must name one." in said
