"""``/``: links to what the service has, and nothing that runs."""

import re

import pytest

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize("playground", [True, False])
def test_every_link_of_the_front_page_leads_somewhere(client, limits, settings, playground):
    settings.PLAYGROUND = playground
    answer = client.get("/")
    assert answer.status_code == 200
    assert answer["Content-Type"].startswith("text/html")
    links = re.findall(r'href="([^"]+)"', answer.content.decode())
    assert ("/playground" in links) is playground
    assert {"/api/docs", "/api/schema?format=json", "/admin/"} <= set(links)
    for link in links:
        assert client.get(link).status_code in (200, 302), link


def test_the_front_page_executes_no_script_and_needs_no_credential(client):
    answer = client.get("/")
    policy = answer["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "<script" not in answer.content.decode()
    assert client.head("/").status_code == 200
    assert client.post("/").status_code == 405
