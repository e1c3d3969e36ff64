"""The admin's pages of models and tools: prices in credits, clear errors, and secrets that are never shown."""

import json
import re
from base64 import b64encode
from collections.abc import Callable
from typing import Any

import pytest
from cryptography.fernet import Fernet
from django.db import IntegrityError, connection, transaction
from django.urls import reverse

from runs import catalogue
from runs.admin.providers import ProviderForm
from runs.catalogue.definitions import Server
from runs.models import AgentModel, Provider, Tool
from tests.admin.conftest import SECRET
from tests.threads import side_by_side

pytestmark = pytest.mark.django_db

ADD_TOOL, ADD_MODEL = reverse("admin:runs_tool_add"), reverse("admin:runs_agentmodel_add")
ADD_PROVIDER = reverse("admin:runs_provider_add")
HEADERS = json.dumps({"Authorization": f"Bearer {SECRET}"})


def tool(**changes: Any) -> dict[str, Any]:
    return {
        "name": "search",
        "display_name": "Search",
        "description": "Searches.",
        "node_type": "http",
        "input_schema": '{"type": "object", "properties": {"q": {"type": "string", "maxLength": 9}}}',
        "price": "1.5",
        "approval": "threshold",
        "url": "https://tools.example.com/search",
        "new_secret_headers": HEADERS,
        "enabled": "on",
    } | changes


def model(**changes: Any) -> dict[str, Any]:
    return {
        "name": "gpt",
        "display_name": "GPT",
        "provider": str(Provider.objects.get(name="openai").pk),
        "context_tokens": "8000",
        "provider_model": "gpt-x",
        "price_in": "0.25",
        "price_out": "1",
        "enabled": "on",
    } | changes


def errors(answer: Any) -> dict[str, list[str]]:
    return dict(answer.context["adminform"].form.errors) if answer.status_code == 200 else {}


@pytest.mark.parametrize("kind", ["http", "mcp"])
def test_a_new_tool_is_available_immediately(boss, kind):
    catalogue.read()
    assert boss.post(ADD_TOOL, tool(node_type=kind, timeout_seconds="2.5")).status_code == 302
    offered = catalogue.read().tools["search"]
    assert (offered.price, offered.timeout_seconds, offered.node_type) == (1_500_000, 2.5, kind)
    assert offered.secret_headers == {"Authorization": f"Bearer {SECRET}"}


def test_a_tools_secret_is_stored_encrypted_and_never_shown(boss, sign_in):
    boss.post(ADD_TOOL, tool())
    row = Tool.objects.get(name="search")
    with connection.cursor() as cursor:
        cursor.execute("SELECT secret_headers FROM runs_tool WHERE name = 'search'")
        cipher = cursor.fetchone()[0]
    assert SECRET not in cipher
    page = reverse("admin:runs_tool_change", args=[row.pk])
    viewer = sign_in("viewer")
    for client in (boss, viewer):
        for url in (page, reverse("admin:runs_tool_changelist"), reverse("admin:runs_tool_history", args=[row.pk])):
            text = client.get(url).content.decode()
            assert SECRET not in text
            assert cipher not in text
    refused = boss.post(page, tool(price="-1")).content.decode()
    assert SECRET not in refused
    boss.post(page, tool(new_secret_headers="", price="2"))
    row = Tool.objects.get(name="search")
    assert (row.price, row.secret_headers) == (2_000_000, HEADERS)
    boss.post(page, tool(new_secret_headers="", forget_secret_headers="on"))
    assert Tool.objects.get(name="search").secret_headers is None


def test_a_signing_secret_is_stored_encrypted_and_never_shown(boss):
    secret = b64encode(SECRET.encode()).decode()
    for wrong in ("sesame!", "whsec_"):
        refused = boss.post(ADD_TOOL, tool(new_signing_secret=wrong))
        assert list(errors(refused)) == ["new_signing_secret"]
    boss.post(ADD_TOOL, tool(new_signing_secret=f"whsec_{secret}"))
    assert catalogue.read().tools["search"].signing_secret == secret
    with connection.cursor() as cursor:
        cursor.execute("SELECT signing_secret FROM runs_tool WHERE name = 'search'")
        cipher = cursor.fetchone()[0]
    assert secret not in cipher
    page = reverse("admin:runs_tool_change", args=[Tool.objects.get(name="search").pk])
    for url in (page, reverse("admin:runs_tool_changelist")):
        text = boss.get(url).content.decode()
        assert secret not in text
        assert cipher not in text
    boss.post(page, tool(price="2"))
    assert Tool.objects.get(name="search").signing_secret == f"whsec_{secret}"
    boss.post(page, tool(forget_signing_secret="on"))
    assert Tool.objects.get(name="search").signing_secret is None


def test_a_tool_with_an_undecryptable_secret_can_be_changed(boss, settings):
    boss.post(ADD_TOOL, tool())
    keys, settings.ENCRYPTION_KEYS = settings.ENCRYPTION_KEYS, [Fernet.generate_key().decode()]
    page = reverse("admin:runs_tool_change", args=[Tool.objects.values_list("pk", flat=True).get(name="search")])
    assert boss.get(reverse("admin:runs_tool_changelist")).status_code == 200
    assert boss.get(page).status_code == 200
    assert boss.post(page, tool(new_secret_headers="", price="3")).status_code == 302
    settings.ENCRYPTION_KEYS = keys
    row = Tool.objects.get(name="search")
    assert (row.price, row.secret_headers) == (3_000_000, HEADERS)


WRONG_TOOLS = [
    *[({"price": price}, "price") for price in ("-1", "NaN", "Infinity", "0.0000001", "x", "", "9" * 30)],
    *[({"timeout_seconds": seconds}, "timeout_seconds") for seconds in ("0", "-1", "nan", "inf", "1e9", "x")],
    *[
        ({"input_schema": schema}, "input_schema")
        for schema in (
            "[]",
            "{",
            "NaN",
            '{"a": NaN}',
            '{"type": "array"}',
            '{"type": 7}',
            '{"a": "\\u0000"}',
            '{"a": "\\ud800"}',
            '{"a":' * 5000 + "1" + "}" * 5000,
            '{"a": 1, "a": 2}',
            '{"properties": {"a": {"pattern": "^(?=x)"}}}',
            '{"properties": {"a": {"$ref": "https://schemas.example/a.json"}}}',
        )
    ],
    *[
        ({"new_secret_headers": text}, "new_secret_headers")
        for text in ("x", "[]", '{"a": 1}', '{"Host": "x"}', '{"a": "x\\ny"}')
    ],
    *[({"name": name}, "name") for name in ("", "with blank", "ü", "x" * 65, "a\0b", "calculate")],
    ({"name": "model"}, "__all__"),
    *[({"url": url}, "url") for url in ("", "ftp://x", "https://", "https://u:p@x.example", "x" * 3000)],
    ({"node_type": "builtin"}, "node_type"),
    ({"node_type": "magic"}, "node_type"),
]


def missed(client: Any, page: str, body: Callable[..., Any], wrong: list[tuple[Any, str]]) -> list[Any]:
    """The changes of the body for which the form of the page finds no mistake at the field."""
    form = type(client.get(page).context["adminform"].form)
    return [changes for changes, field in wrong if field not in form(body(**changes)).errors]


def test_each_mistake_in_a_tool_is_named_at_its_field(boss):
    assert missed(boss, ADD_TOOL, tool, WRONG_TOOLS) == []


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"price": "-1"}, "price"),
        ({"input_schema": '{"a": "\\ud800"}'}, "input_schema"),
        ({"new_secret_headers": f'{{"Host": "{SECRET}"}}'}, "new_secret_headers"),
        ({"name": "a\0b"}, "name"),
        ({"url": "https://u:p@x.example"}, "url"),
    ],
)
def test_an_invalid_tool_is_a_clear_error_and_is_not_saved(boss, wrong, field):
    before = list(Tool.objects.order_by("pk").values())
    answer = boss.post(ADD_TOOL, tool(**wrong))
    assert field in errors(answer)
    assert SECRET not in answer.content.decode()
    assert list(Tool.objects.order_by("pk").values()) == before


def test_the_unsupported_pattern_of_a_schema_is_named(boss):
    answer = boss.post(ADD_TOOL, tool(input_schema='{"properties": {"a": {"type": "string", "pattern": "^(?=x)"}}}'))
    (message,) = errors(answer)["input_schema"]
    assert message.startswith("At properties.a.pattern: The pattern ^(?=x) cannot be used")


@pytest.mark.parametrize("write", [Tool.objects.create, lambda **row: Tool.objects.bulk_create([Tool(**row)])])
def test_the_database_refuses_a_tool_named_model(write):
    with pytest.raises(IntegrityError), transaction.atomic():
        write(name="model", display_name="Model", description="", node_type="http", price=0)


def test_a_new_model_is_available_immediately(boss):
    assert boss.post(ADD_MODEL, model()).status_code == 302
    offered = catalogue.read().model("gpt")
    assert (offered.price_in, offered.price_out) == (250_000, 1_000_000)
    row = AgentModel.objects.get(name="gpt")
    page = boss.get(reverse("admin:runs_agentmodel_change", args=[row.pk])).content.decode()
    assert 'value="0.25"' in page


def test_a_new_default_model_replaces_the_old_one(boss):
    assert boss.post(ADD_MODEL, model(is_default="on")).status_code == 302
    assert list(AgentModel.objects.filter(is_default=True).values_list("name", flat=True)) == ["gpt"]
    assert catalogue.read().model(None).name == "gpt"


WRONG_MODELS = [
    *[({"price_in": price}, "price_in") for price in ("-0.1", "NaN", "1e400", "0.0000001", "", "one")],
    *[({"price_out": price}, "price_out") for price in ("-1", "9" * 25)],
    ({"provider": "other"}, "provider"),
    *[({"parameters": text}, "parameters") for text in ("[]", '{"temperatur": 1}', '{"temperature": 3}', "{")],
    *[({"dialect": text}, "dialect") for text in ('{"x": 1}', '{"imageInput": 1}', '{"systemRole": "boss"}')],
    *[({"fallbacks": text}, "fallbacks") for text in ("gone", "gpt", "demo, demo")],
    ({"context_tokens": "0"}, "context_tokens"),
    ({"provider_model": ""}, "provider_model"),
    ({"name": "demo"}, "name"),
    ({"name": "a\0"}, "name"),
]


def test_each_mistake_in_a_model_is_named_at_its_field(boss):
    assert missed(boss, ADD_MODEL, model, WRONG_MODELS) == []


def test_an_invalid_model_is_a_clear_error_and_is_not_saved(boss):
    before = AgentModel.objects.count()
    for wrong, field in WRONG_MODELS[-2:]:
        assert field in errors(boss.post(ADD_MODEL, model(**wrong))), wrong
    assert AgentModel.objects.count() == before


def provider(**changes: Any) -> dict[str, Any]:
    return {"name": "local", "kind": "openai", "base_url": "http://127.0.0.1:9/v1", "enabled": "on"} | changes


def test_a_providers_secrets_are_stored_encrypted_and_never_shown(boss, sign_in):
    boss.post(ADD_PROVIDER, provider(new_api_key=SECRET, new_headers=HEADERS))
    row = Provider.objects.get(name="local")
    assert (row.api_key, row.headers) == (SECRET, HEADERS)
    with connection.cursor() as cursor:
        cursor.execute("SELECT api_key, headers FROM runs_provider WHERE name = 'local'")
        ciphers = cursor.fetchone()
    page = reverse("admin:runs_provider_change", args=[row.pk])
    for client in (boss, sign_in("viewer")):
        for url in (
            page,
            reverse("admin:runs_provider_changelist"),
            reverse("admin:runs_provider_history", args=[row.pk]),
        ):
            text = client.get(url).content.decode()
            assert not any(secret in text for secret in (SECRET, *ciphers))
    boss.post(page, provider(max_concurrent="3"))
    row.refresh_from_db()
    assert (row.api_key, row.max_concurrent) == (SECRET, 3)
    boss.post(page, provider(forget_api_key="on", forget_headers="on"))
    row.refresh_from_db()
    assert (row.api_key, row.headers) == (None, None)


def test_a_provider_with_an_undecryptable_secret_can_be_changed_and_gets_models(boss, settings):
    boss.post(ADD_PROVIDER, provider(new_api_key=SECRET, new_headers=HEADERS))
    key = Provider.objects.get(name="local").pk
    keys, settings.ENCRYPTION_KEYS = settings.ENCRYPTION_KEYS, [Fernet.generate_key().decode()]
    assert boss.get(reverse("admin:runs_provider_changelist")).status_code == 200
    saved = boss.post(reverse("admin:runs_provider_change", args=[key]), provider(max_concurrent="3"), follow=True)
    assert "local cannot be used yet: No key of ENCRYPTION_KEYS decrypts its secrets." in saved.content.decode()
    assert boss.post(ADD_MODEL, model(provider=str(key))).status_code == 302
    settings.ENCRYPTION_KEYS = keys
    row = Provider.objects.get(name="local")
    assert (row.api_key, row.headers, row.max_concurrent) == (SECRET, HEADERS, 3)


MOVES = [
    ("http://127.0.0.1:9/v1", "http://127.0.0.1:9/other", True),
    ("http://EXAMPLE.com/v1", "http://example.com:80/v1", True),
    ("http://example.com/v1", "https://example.com/v1", False),
    ("http://127.0.0.1:9/v1", "http://127.0.0.1:10/v1", False),
    ("https://example.com/v1", "https://example.org/v1", False),
]


@pytest.mark.parametrize(("before", "after", "kept"), MOVES)
def test_stored_secrets_do_not_go_to_another_server(boss, before, after, kept):
    signing = b64encode(SECRET.encode()).decode()
    boss.post(ADD_PROVIDER, provider(base_url=before, new_api_key=SECRET, new_headers=HEADERS))
    boss.post(ADD_TOOL, tool(url=before, new_signing_secret=signing))
    row, called = Provider.objects.get(name="local"), Tool.objects.get(name="search")
    of_provider = reverse("admin:runs_provider_change", args=[row.pk])
    of_tool = reverse("admin:runs_tool_change", args=[called.pk])
    boss.post(of_provider, provider(base_url=after))
    boss.post(of_tool, tool(url=after, new_secret_headers=""))
    row, called = Provider.objects.get(name="local"), Tool.objects.get(name="search")
    assert (row.base_url, called.url) == (after, after)
    assert [row.api_key, row.headers] == ([SECRET, HEADERS] if kept else [None, None])
    assert [called.secret_headers, called.signing_secret] == ([HEADERS, signing] if kept else [None, None])

    boss.post(of_provider, provider(base_url=before, new_api_key=SECRET))
    boss.post(of_tool, tool(url=before))
    row, called = Provider.objects.get(name="local"), Tool.objects.get(name="search")
    assert (row.api_key, called.secret_headers) == (SECRET, HEADERS)


def test_a_stored_key_for_the_environments_address_stays_there(boss, settings):
    settings.OPENAI_BASE_URL, settings.OPENAI_API_KEY = "https://proxy.example.com/v1", "sk-of-the-environment"
    row = Provider.objects.get_or_create(name="openai", defaults={"kind": "openai"})[0]
    page = reverse("admin:runs_provider_change", args=[row.pk])
    boss.post(page, provider(name="openai", base_url="", new_api_key=SECRET))
    boss.post(page, provider(name="openai", base_url="https://proxy.example.com/v2"))
    assert Server.from_row(Provider.objects.get(name="openai")).api_key == SECRET
    boss.post(page, provider(name="openai", base_url="https://elsewhere.example.com/v1"))
    assert Server.from_row(Provider.objects.get(name="openai")).api_key == ""


def test_a_preset_fills_in_the_kind_and_the_address_and_a_missing_key_is_warned_of(boss):
    answer = boss.post(ADD_PROVIDER, provider(kind="", base_url="", preset="mistral"), follow=True)
    row = Provider.objects.get(name="local")
    assert (row.kind, row.base_url) == ("openai", "https://api.mistral.ai/v1")
    assert "Its key is missing" in answer.content.decode()
    answer = boss.post(ADD_MODEL, model(provider=str(row.pk)), follow=True)
    assert "Its key is missing" in answer.content.decode()


def test_each_field_of_a_provider_is_in_its_form_once(boss):
    """A browser sends a field that is there twice twice, and the last one counts."""
    change = reverse("admin:runs_provider_change", args=[Provider.objects.get(name="openai").pk])
    for page in (ADD_PROVIDER, change):
        names = re.findall(r'name="(\w+)"', boss.get(page).content.decode().partition('id="provider_form"')[2])
        fields = [name for name in names if name in ProviderForm.base_fields]
        assert sorted(fields) == sorted(ProviderForm.base_fields)


WRONG_PROVIDERS = [
    ({"kind": ""}, "kind"),
    ({"kind": "magic"}, "kind"),
    ({"name": "openai"}, "name"),
    ({"base_url": "https://u:p@x.example"}, "base_url"),
    ({"base_url": "ftp://x"}, "base_url"),
    ({"new_headers": "x"}, "new_headers"),
    ({"max_concurrent": "-1"}, "max_concurrent"),
    ({"max_concurrent": "0"}, "max_concurrent"),
    ({"requests_per_minute": "0"}, "requests_per_minute"),
]


def test_each_mistake_in_a_provider_is_named_at_its_field(boss):
    assert missed(boss, ADD_PROVIDER, provider, WRONG_PROVIDERS) == []


def test_an_invalid_provider_is_a_clear_error_and_is_not_saved(boss):
    before = Provider.objects.count()
    for wrong, field in WRONG_PROVIDERS[-2:]:
        assert field in errors(boss.post(ADD_PROVIDER, provider(**wrong))), wrong
    assert Provider.objects.count() == before


def test_a_model_can_be_tested(boss, sign_in):
    page = reverse("admin:runs_agentmodel_test", args=[AgentModel.objects.get(name="demo").pk])
    assert "it answers" not in boss.get(page).content.decode()
    assert "it answers" in boss.post(page).content.decode()
    boss.post(ADD_PROVIDER, provider())
    boss.post(ADD_MODEL, model(provider=str(Provider.objects.get(name="local").pk)))
    page = reverse("admin:runs_agentmodel_test", args=[AgentModel.objects.get(name="gpt").pk])
    assert "provider_unreachable" in boss.post(page).content.decode()
    assert sign_in("viewer").post(page).status_code == 403


def test_staff_who_may_only_look_see_prices_in_credits_and_the_state_of_the_key(sign_in, settings):
    settings.OPENAI_API_KEY = ""
    row = AgentModel.objects.get(name="demo")
    AgentModel.objects.filter(pk=row.pk).update(price_in=250_000, price_cached_in=75_000)
    viewer = sign_in("viewer")
    shown = viewer.get(reverse("admin:runs_agentmodel_change", args=[row.pk])).content.decode()
    assert re.search(r"Price of 1,000 tokens in \(credits\).*?0\.25\b.*?cache \(credits\).*?0\.075\b", shown, re.DOTALL)
    assert not re.search(r"\b(250,?000|75,?000)\b", shown)
    provider = reverse("admin:runs_provider_change", args=[Provider.objects.get(name="openai").pk])
    shown = viewer.get(provider).content.decode()
    assert "missing: OPENAI_API_KEY" in shown
    assert "(&#x27;missing&#x27;" not in shown


def test_changing_the_catalogue_requires_the_permission(sign_in):
    for role in ("viewer", "support", "billing"):
        assert sign_in(role).post(ADD_TOOL, tool()).status_code == 403
        assert sign_in(role).post(ADD_MODEL, model()).status_code == 403
    editor = sign_in(permissions=("runs.add_tool", "runs.view_tool"))
    assert editor.post(ADD_TOOL, tool()).status_code == 302


def test_the_page_of_a_built_in_tool_shows_the_declared_price_and_schema(boss):
    row = Tool.objects.get(name="draw_chart")
    Tool.objects.filter(pk=row.pk).update(price=1, input_schema={"type": "object"})
    form = boss.get(reverse("admin:runs_tool_change", args=[row.pk])).context["adminform"].form
    assert form.initial["price"] == 1
    assert "price is 12." in form.fields["price"].help_text
    assert '"maxItems":1000' in form.fields["input_schema"].help_text
    assert "draw_chart" not in boss.get(ADD_TOOL).context["adminform"].form.fields["input_schema"].help_text


def test_a_built_in_tool_cannot_be_deleted(boss):
    boss.post(ADD_TOOL, tool())
    rows = {row.name: row.pk for row in Tool.objects.all()}
    assert boss.post(reverse("admin:runs_tool_delete", args=[rows["calculate"]]), {"post": "yes"}).status_code == 403
    selected = {"action": "delete_selected", "post": "yes", "_selected_action": [rows["calculate"], rows["search"]]}
    boss.post(reverse("admin:runs_tool_changelist"), selected)
    assert set(Tool.objects.values_list("name", flat=True)) == set(rows)
    boss.post(reverse("admin:runs_tool_delete", args=[rows["search"]]), {"post": "yes"})
    assert set(Tool.objects.values_list("name", flat=True)) == set(rows) - {"search"}


@pytest.mark.django_db(transaction=True)
def test_of_staff_who_save_at_the_same_moment_each_gets_an_answer(sign_in):
    AgentModel.objects.all().delete()
    Provider.objects.get_or_create(name="openai", defaults={"kind": "openai"})
    clients = [sign_in(superuser=True) for _ in range(4)]

    def add(number: int) -> tuple[int, int]:
        named = model(name=f"model-{number}", is_default="on")
        return clients[number].post(ADD_TOOL, tool()).status_code, clients[number].post(ADD_MODEL, named).status_code

    answers = side_by_side(4, add)
    assert sorted(of_tool for of_tool, _ in answers) == [200, 200, 200, 302]
    assert [of_model for _, of_model in answers] == [302] * 4
    assert AgentModel.objects.filter(is_default=True).count() == 1
