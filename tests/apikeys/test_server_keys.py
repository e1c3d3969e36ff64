"""Tests of server keys and POST /session-tokens."""

import json
import re
import time

import pytest
from django.urls import reverse
from rest_framework.test import APIClient

from apikeys import keys
from apikeys.models import ServerKey
from config.api import session_tokens
from tests import factories
from tests.api.conftest import limits, redis_server  # noqa: F401

pytestmark = pytest.mark.django_db
URL = "/api/v1/session-tokens"


@pytest.fixture
def backend() -> APIClient:
    return factories.server_client()


def ask(client: APIClient, **body):
    return client.post(URL, body, format="json")


def test_a_backend_gets_a_token_for_its_user(backend):
    before = time.time()
    answer = ask(backend, sub="user-4711", email="ada@example.com", hours=1)
    assert answer.status_code == 201
    assert set(answer.json()) == {"token", "expiresAt"}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.000Z", answer.json()["expiresAt"])
    token = answer.json()["token"]
    assert before + 3600 - 2 <= session_tokens.verify(token)["exp"] <= time.time() + 3600 + 2
    me = APIClient().get("/api/v1/me", headers={"Authorization": f"Bearer {token}"}).json()
    assert (me["username"], me["email"]) == ("user-4711", "ada@example.com")
    again = ask(backend, sub="user-4711").json()["token"]
    assert APIClient().get("/api/v1/me", headers={"Authorization": f"Bearer {again}"}).json()["id"] == me["id"]


def test_the_key_is_good_for_nothing_else(backend):
    for path in ("/api/v1/me", "/api/v1/chats", "/api/public/v1/key", "/api/public/v1/chats"):
        assert backend.get(path).status_code == 401, path
    assert backend.post("/api/v1/api-keys", {"name": "x"}, format="json").status_code == 401
    assert backend.post("/api/mcp", {}, format="json").status_code == 401


def test_other_credentials_get_no_token(user, session, public):
    key = ServerKey.objects.create(name="old", prefix="aws_1234", digest=keys.digest("aws_" + "0" * 49))
    wrong = [session, public, APIClient()]
    for secret in ("aws_" + "0" * 49, "aws_short", keys.new_secret(keys.SERVER_MARK)):
        client = APIClient()
        client.credentials(HTTP_AUTHORIZATION=f"Bearer {secret}")
        wrong.append(client)
    for client in wrong:
        answer = ask(client, sub="ada")
        assert (answer.status_code, answer["WWW-Authenticate"]) == (401, "Bearer")
    key.refresh_from_db()
    assert key.last_used_at is None


def test_a_revoked_key_is_refused_at_once(backend):
    key = ServerKey.objects.get()
    assert ask(backend, sub="ada").status_code == 201
    assert keys.revoke_key(key)
    assert ask(backend, sub="ada").status_code == 401


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "sub"),
        ({"sub": ""}, "sub"),
        ({"sub": "x" * 151}, "sub"),
        ({"sub": 7}, "sub"),
        ({"sub": "a\0b"}, None),
        ({"sub": "ada", "hours": 0}, "hours"),
        ({"sub": "ada", "hours": 25}, "hours"),
        ({"sub": "ada", "hours": 1.5}, "hours"),
        ({"sub": "ada", "email": "nobody"}, "email"),
        ({"sub": "ada", "scope": "all"}, "scope"),
    ],
)
def test_wrong_bodies_are_400(backend, body, field):
    answer = ask(backend, **body)
    assert answer.status_code == 400
    if field:
        assert field in answer.json()["error"]["details"]["fields"]


def test_no_token_for_staff_or_an_inactive_user(backend):
    factories.UserFactory(username="boss", is_staff=True)
    factories.UserFactory(username="root", is_superuser=True)
    factories.UserFactory(username="gone", is_active=False)
    for name in ("boss", "root", "gone"):
        assert "sub" in ask(backend, sub=name).json()["error"]["details"]["fields"]


def test_an_identity_provider_excludes_server_keys(backend, settings):
    settings.SESSION_ISSUER = "https://id.example.com/"
    answer = ask(backend, sub="ada")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "CONFLICT")
    assert "id.example.com" not in answer.content.decode()


def test_the_key_is_stored_as_a_digest(backend):
    secret = backend._credentials["HTTP_AUTHORIZATION"].removeprefix("Bearer ")
    assert re.fullmatch(r"aws_[0-9A-Za-z]{49}", secret)
    assert secret not in json.dumps(list(ServerKey.objects.values()), default=str)
    assert ServerKey.objects.get().prefix == secret[:8]


def test_each_token_is_logged_without_names(backend, caplog):
    known = factories.UserFactory(username="canary-name")
    with caplog.at_level("INFO"):
        token = ask(backend, sub="canary-name").json()["token"]
        ask(backend, sub="canary-other")
    lines = [record.getMessage() for record in caplog.records if "session token" in record.getMessage()]
    key = ServerKey.objects.get()
    assert lines == [
        f"server key {key.pk} made a session token for user {known.pk}",
        f"server key {key.pk} made a session token for user (new)",
    ]
    assert "canary" not in caplog.text
    assert token not in caplog.text
    assert key.last_used_at is not None


def test_a_key_has_a_rate_limit_of_its_own(limits, backend, monkeypatch):  # noqa: F811
    monkeypatch.setattr("config.api.viewsets.SERVER_KEY_REQUESTS", 2)
    assert [ask(backend, sub="ada").status_code for _ in range(3)] == [201, 201, 429]
    refused = ask(backend, sub="ada")
    assert refused["X-RateLimit-Limit"] == "2"
    assert int(refused["Retry-After"]) >= 1
    assert ask(factories.server_client(), sub="ada").status_code == 201


# --- the admin -------------------------------------------------------------------------------------------------------
@pytest.fixture
def staff(client):
    client.force_login(factories.UserFactory(is_staff=True, is_superuser=True))
    return client


def test_staff_create_a_key_that_is_shown_once(staff):
    url = reverse("admin:apikeys_serverkey_do", args=["create"])
    asked = staff.post(url, {"name": "Backend", "scopes": ["session-tokens", "credits"]}).content.decode()
    assert asked.count(" checked") == 2
    shown = staff.post(
        url, {"step": "confirm", "name": "Backend", "scopes": ["session-tokens"]}, follow=True
    ).content.decode()
    (secret,) = set(re.findall(r"aws_[0-9A-Za-z]{49}", shown))
    client = APIClient()
    client.credentials(HTTP_AUTHORIZATION=f"Bearer {secret}")
    assert ask(client, sub="ada").status_code == 201
    key = ServerKey.objects.get()
    page = reverse("admin:apikeys_serverkey_change", args=[key.pk])
    for later in (page, reverse("admin:apikeys_serverkey_changelist"), reverse("admin:admin_logentry_changelist")):
        text = staff.get(later).content.decode()
        assert secret not in text
        assert key.digest not in text
    revoke = reverse("admin:apikeys_serverkey_do", args=["revoke"])
    staff.post(revoke, {"step": "confirm", "_selected_action": [key.pk]})
    assert ask(client, sub="ada").status_code == 401


def test_roles_cannot_create_keys(client):
    client.force_login(factories.UserFactory(is_staff=True))
    assert client.get(reverse("admin:apikeys_serverkey_do", args=["create"])).status_code == 403
