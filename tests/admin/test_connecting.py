"""What the catalogue's pages say beside their forms: what a server lists, a missing key, the catalogue file, what to do
next.
"""

from __future__ import annotations

import html
import json
import re
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from django.urls import reverse

from runs.models import Provider, Tool
from tests.admin.conftest import SECRET
from tests.admin.test_catalogue import ADD_PROVIDER, provider
from tests.http_server import serving

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


def test_the_catalogues_pages_name_the_catalogue_file(boss, settings):
    page = reverse("admin:runs_tool_change", args=[Tool.objects.get(name="calculate").pk])
    assert "catalogue.yaml" not in boss.get(page).content.decode()
    settings.CATALOGUE_FILE = "/etc/catalogue.yaml"
    assert "/etc/catalogue.yaml sets back what it lists" in boss.get(page).content.decode()
