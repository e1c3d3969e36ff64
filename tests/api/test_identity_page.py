"""Tests of docs/identity.md: its settings accept its tokens, and its backend gets a token from a real server."""

import json
import re
import time
from pathlib import Path

import pytest
from rest_framework.test import APIClient

from apikeys.keys import create_server_key

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "identity.md").read_text()


def snippet(language: str, name: str) -> str:
    (found,) = re.findall(rf"^```{language} {name}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return found


@pytest.mark.django_db
@pytest.mark.parametrize("name", ["keycloak", "auth0", "clerk"])
def test_a_provider_s_token_is_accepted_with_its_settings(provider, settings, name):
    values = dict(line.split("=", 1) for line in snippet("env", name).splitlines())
    assert set(values) == {"SESSION_ISSUER", "SESSION_AUDIENCE", "SESSION_JWKS_URL"}
    settings.SESSION_ISSUER, settings.SESSION_AUDIENCE = values["SESSION_ISSUER"], values["SESSION_AUDIENCE"]
    now = int(time.time())
    claims = json.loads(snippet("json", name)) | {"iat": now, "exp": now + 60}
    for changes, status in (({}, 200), ({"aud": "other"}, 401), ({"iss": claims["iss"] + "x"}, 401)):
        token = provider.token("r1", claims=claims | changes)
        answer = APIClient().get("/api/v1/me", headers={"Authorization": f"Bearer {token}"})
        assert answer.status_code == status
        if status == 200:
            assert answer.json()["username"] == claims["sub"]


@pytest.mark.django_db(transaction=True)
def test_the_backend_of_an_app_gets_a_token(live_server):
    scope: dict = {}
    exec(snippet("python", "backend"), scope)
    token = scope["session_token"](live_server.url, create_server_key("backend")[1], "user-4711", "ada@example.com")
    me = APIClient().get("/api/v1/me", headers={"Authorization": f"Bearer {token}"}).json()
    assert (me["username"], me["email"]) == ("user-4711", "ada@example.com")


@pytest.mark.django_db
def test_each_message_of_the_page_is_one_of_the_service():
    from config.api import authentication, session_tokens

    sources = Path(session_tokens.__file__).read_text() + Path(authentication.__file__).read_text()
    messages = re.findall(r"^\| (The .*?\.) \|", PAGE, re.MULTILINE)
    assert len(messages) == 5
    for message in messages:
        assert message in sources
