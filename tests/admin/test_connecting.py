"""What the catalogue's pages say beside their forms: what a server lists, a missing key, the catalogue file, what to do
next.
"""

import html
import io
import json
import re
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from django.core.management import call_command
from django.urls import reverse

from config.staff.base import page_of
from runs.catalogue import file as catalogue_file
from runs.models import Agent, Provider, Tool
from tests.admin.conftest import SECRET
from tests.admin.test_actions import Doing
from tests.admin.test_catalogue import ADD_PROVIDER, ADD_TOOL, provider, tool
from tests.factories import EndpointFactory
from tests.http_server import serving
from webhooks.models import Endpoint

pytestmark = pytest.mark.django_db


def test_a_new_provider_leads_to_its_models_and_a_missing_key_is_named(boss, settings):
    class Models(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            good = (self.path, self.headers["Authorization"]) == ("/v1/models", f"Bearer {SECRET}")
            error = {"error": f"no {self.headers['Authorization']}"}
            body = json.dumps({"data": [{"id": "qwen"}, {"id": "llama<b>"}]} if good else error)
            self.send_response(200 if good else 401)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: Any) -> None:
            pass

    with serving(Models) as address:
        added = boss.post(ADD_PROVIDER, provider(base_url=f"{address}/v1", new_api_key=SECRET))
        test = reverse("admin:runs_provider_test", args=[Provider.objects.get(name="local").pk])
        assert added["Location"] == test
        page = boss.post(test).content.decode()
        assert "llama&lt;b&gt;" in page
        link = html.unescape(re.findall(r'href="(/admin/runs/agentmodel/add/[^"]*qwen[^"]*)"', page)[0])
        form = boss.get(link).context["adminform"].form
        assert (form["provider_model"].value(), form["provider"].value()) == ("qwen", test.split("/")[-3])
        wrong = "sk-another-canary-of-a-key"
        boss.post(test.replace("test/", "change/"), provider(base_url=f"{address}/v1", new_api_key=wrong))
        page = boss.post(test).content.decode()
        assert "provider_unauthorized" in page
        assert wrong not in page
    assert "provider_unreachable" in boss.post(test).content.decode()
    settings.OPENAI_API_KEY = ""
    assert "missing: OPENAI_API_KEY" in boss.get(reverse("admin:runs_provider_changelist")).content.decode()
    settings.OPENAI_API_KEY = "sk-x"
    assert "missing: OPENAI_API_KEY" not in boss.get(reverse("admin:runs_provider_changelist")).content.decode()


def test_the_test_of_a_provider_of_a_kind_that_is_gone_says_so(boss):
    boss.post(ADD_PROVIDER, provider())
    row = Provider.objects.get(name="local")
    Provider.objects.filter(pk=row.pk).update(kind="gone")
    page = boss.post(reverse("admin:runs_provider_test", args=[row.pk])).content.decode()
    assert "There is no kind of provider named gone." in page


def test_a_row_of_the_catalogue_file_says_so_with_what_differs(boss, settings, tmp_path):
    file = tmp_path / "catalogue.yaml"
    file.write_text(
        "# ours\ntools:\n  - {name: other, description: x, nodeType: http, url: 'https://x.example', price: 1}\n"
        "  - {name: search, displayName: Search, description: x, nodeType: http, url: 'https://x.example', price: 2}\n"
    )
    settings.CATALOGUE_FILE = str(file)
    call_command("catalogue", "apply", stdout=io.StringIO())
    page = reverse("admin:runs_tool_change", args=[Tool.objects.get(name="search").pk])
    assert f"{file}, line 4, lists search" in boss.get(page).content.decode()
    answer = boss.post(
        page, tool(price="3", description="x", display_name="Search", url="https://x.example"), follow=True
    )
    assert f"{file}, line 4, lists search" in answer.content.decode()
    assert re.search("It will set [^.]*price", boss.get(page).content.decode())
    assert (
        "lists calculate"
        not in boss.get(
            reverse("admin:runs_tool_change", args=[Tool.objects.get(name="calculate").pk])
        ).content.decode()
    )
    file.write_text("tools: [")
    assert boss.get(page).status_code == 200


def test_another_order_of_an_agents_tools_in_the_file_is_no_difference(boss, settings, tmp_path):
    file = tmp_path / "catalogue.yaml"
    settings.CATALOGUE_FILE = str(file)
    for tools in ("calculate, ask_user", "ask_user, calculate"):
        file.write_text(f"agents:\n  - {{name: support, tools: [{tools}]}}\n")
        call_command("catalogue", "apply", stdout=io.StringIO())
    page = boss.get(reverse("admin:runs_agent_change", args=[Agent.objects.get(name="support").pk])).content.decode()
    assert f"{file}, line 2, lists support" in page
    assert "It will set" not in page


def test_a_row_of_the_file_says_so_without_the_variables_of_its_secrets(boss, settings, tmp_path, monkeypatch):
    file = tmp_path / "catalogue.yaml"
    file.write_text(
        "providers:\n  - {name: local, kind: openai, baseUrl: 'http://127.0.0.1:9', apiKey: '${CANARY_KEY}'}\n"
    )
    settings.CATALOGUE_FILE = str(file)
    monkeypatch.setenv("CANARY_KEY", SECRET)
    call_command("catalogue", "apply", stdout=io.StringIO())
    monkeypatch.delenv("CANARY_KEY")
    page = reverse("admin:runs_provider_change", args=[Provider.objects.get(name="local").pk])
    assert f"{file}, line 2, lists local" in boss.get(page).content.decode()


def test_a_save_in_a_browser_keeps_the_lines_of_the_catalogue_file(boss):
    lines = "|\n      One.\n      Two.\n"
    raw = f"""
tools:
  - name: search
    nodeType: http
    url: https://x.example
    price: 1
    description: {lines}
agents:
  - name: support
    description: {lines}
    instructions: {lines}
"""
    catalogue_file.apply("catalogue.yaml", raw.encode())
    for row in (Tool.objects.get(name="search"), Agent.objects.get()):
        page = page_of(type(row), str(row.pk))
        form = boss.get(page).context["adminform"].form
        shown = {name: form[name].value() for name in form.fields}
        sent = {
            name: str(value).replace("\n", "\r\n") for name, value in shown.items() if value not in (None, False, [])
        }
        assert boss.post(page, sent).status_code == 302
    assert catalogue_file.apply("catalogue.yaml", raw.encode(), check=True).changes == {}


def test_the_installation_endpoint_of_the_catalogue_file_says_so_with_what_differs(boss, settings, tmp_path):
    file = tmp_path / "catalogue.yaml"
    file.write_text(f"# ours\ninstallationEndpoint: {{url: 'http://127.0.0.1:9/x', secret: '{'0' * 64}'}}\n")
    settings.CATALOGUE_FILE, settings.OUTBOUND_ALLOW_PRIVATE = str(file), True
    call_command("catalogue", "apply", stdout=io.StringIO())
    installation = Endpoint.objects.get(user=None)
    page = reverse("admin:webhooks_endpoint_change", args=[installation.pk])
    shown = boss.get(page).content.decode()
    assert f"{file}, line 2, lists endpoint {installation.pk}" in shown
    assert "(installation)" in shown
    assert "It will set" not in shown
    Doing(boss, "webhooks_endpoint", "disable", installation).confirm()
    assert "It will set enabled." in boss.get(page).content.decode()
    other = reverse("admin:webhooks_endpoint_change", args=[EndpointFactory().pk])
    assert "lists endpoint" not in boss.get(other).content.decode()


def test_a_saved_http_tool_offers_a_try(boss):
    page = boss.get(ADD_TOOL).context["adminform"].form
    assert page["node_type"].value() == "http"
    answer = boss.post(ADD_TOOL, tool(node_type="http"), follow=True)
    assert reverse("admin:runs_tool_try_it", args=[Tool.objects.get(name="search").pk]) in answer.content.decode()
