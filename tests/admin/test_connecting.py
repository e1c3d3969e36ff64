"""What the catalogue's pages say beside their forms: a missing key, and that a catalogue file is applied."""

from __future__ import annotations

import pytest
from django.urls import reverse

from runs.models import Tool

pytestmark = pytest.mark.django_db


def test_a_missing_key_is_named(boss, settings):
    settings.OPENAI_API_KEY = ""
    assert "missing: OPENAI_API_KEY" in boss.get(reverse("admin:runs_provider_changelist")).content.decode()
    settings.OPENAI_API_KEY = "sk-x"
    assert "missing: OPENAI_API_KEY" not in boss.get(reverse("admin:runs_provider_changelist")).content.decode()


def test_the_catalogues_pages_name_the_catalogue_file(boss, settings):
    page = reverse("admin:runs_tool_change", args=[Tool.objects.get(name="calculate").pk])
    assert "catalogue.yaml" not in boss.get(page).content.decode()
    settings.CATALOGUE_FILE = "/etc/catalogue.yaml"
    assert "/etc/catalogue.yaml sets back what it lists" in boss.get(page).content.decode()
