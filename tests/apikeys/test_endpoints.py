"""/api-keys, /key and requests with a key (docs/resources.md)."""

from datetime import timedelta

import pytest
from django.db import OperationalError
from django.urls import reverse
from rest_framework.test import APIClient

from apikeys import keys
from apikeys.models import ApiKey
from config.kernel import clock
from tests import factories
from tests.threads import side_by_side

pytestmark = pytest.mark.django_db
DAY = timedelta(days=1)


def create(session, body=None, **extra):
    return session.post("/api/v1/api-keys", {"name": "ci"} if body is None else body, format="json", **extra)


def bearing(secret: str) -> APIClient:
    client = APIClient()
    client.credentials(HTTP_AUTHORIZATION=f"Bearer {secret}")
    return client


def refused(response) -> bool:
    return (response.status_code, response.json()["error"]["code"]) == (401, "UNAUTHORIZED") and response[
        "WWW-Authenticate"
    ] == "Bearer"


class TestCreate:
    def test_the_answer_shows_the_secret(self, session):
        response = create(session, {"name": "  ci  ", "expirationDays": 30})
        body = response.json()
        key = ApiKey.objects.get()
        assert response.status_code == 201
        assert body == {
            "id": key.pk,
            "name": "ci",
            "prefix": body["secret"][:8],
            "scopes": list(keys.DEFAULT_SCOPES),
            "secret": body["secret"],
            "createdAt": clock.iso(key.created_at),
            "expiresAt": clock.iso(key.expires_at),
            "lastUsedAt": None,
            "revokedAt": None,
        }
        assert key.pk.startswith("key_")
        assert bearing(body["secret"]).get("/api/public/v1/key").status_code == 200

    @pytest.mark.parametrize(("days", "lifetime"), [(None, 90), (1, 1), (365, 365), (30.0, 30)])
    def test_the_lifetime(self, session, days, lifetime):
        before = clock.now()
        create(session, {"name": "ci"} | ({} if days is None else {"expirationDays": days}))
        key = ApiKey.objects.get()
        assert key.expires_at - key.created_at == lifetime * DAY
        assert before <= key.created_at <= clock.now()

    @pytest.mark.parametrize("days", [0, 366, -1, 1.5, "30", True, False, None, [], {}, 10**18, 2**63])
    def test_an_invalid_lifetime_is_400(self, session, days):
        response = create(session, {"name": "ci", "expirationDays": days})
        assert response.status_code == 400
        assert days == 2**63 or list(response.json()["error"]["details"]["fields"]) == ["expirationDays"]
        assert not ApiKey.objects.exists()

    @pytest.mark.parametrize("name", ["", "  ", "x" * 101, None, 5, True, [], {}])
    def test_an_invalid_name_is_400(self, session, name):
        response = create(session, {"name": name})
        assert list(response.json()["error"]["details"]["fields"]) == ["name"]
        assert create(session, {}).status_code == 400
        assert not ApiKey.objects.exists()

    def test_other_fields_are_400(self, session):
        body = create(session, {"name": "x" * 100, "scopes": ["admin"], "secret": "awk_mine", "id": "key_mine"}).json()
        assert body["error"]["details"]["fields"] == {key: ["Unknown field."] for key in ("scopes", "secret", "id")}

    def test_too_many_live_keys_are_409(self, session, monkeypatch):
        monkeypatch.setattr("apikeys.keys.API_KEY_MAX_LIVE", 1)
        create(session)
        response = create(session)
        assert (response.status_code, response.json()["error"]["code"]) == (409, "CONFLICT")

    def test_the_answer_with_the_secret_is_not_stored_for_a_replay(self, session):
        secret = create(session, HTTP_IDEMPOTENCY_KEY="k").json()["secret"]
        replay = create(session, HTTP_IDEMPOTENCY_KEY="k")
        assert (replay.status_code, replay.json()["error"]["code"]) == (409, "IDEMPOTENCY_KEY_REUSED")
        assert secret not in replay.content.decode()
        assert ApiKey.objects.count() == 1

    def test_it_requires_a_session_token(self, public):
        assert refused(create(APIClient()))
        assert refused(create(public))


class TestList:
    def test_the_newest_come_first_and_without_secrets(self, session):
        made = [create(session, {"name": str(number)}).json() for number in range(3)]
        response = session.get("/api/v1/api-keys?limit=2")
        assert [item["name"] for item in response.json()["items"]] == ["2", "1"]
        assert set(response.json()["items"][0]) == set(made[0]) - {"secret"}
        rest = session.get(f"/api/v1/api-keys?limit=2&cursor={response.json()['nextCursor']}").json()
        assert [item["name"] for item in rest["items"]] == ["0"]
        assert rest["nextCursor"] is None
        assert not any(key["secret"] in response.content.decode() for key in made)


class TestRevoke:
    def test_it_takes_effect_immediately_and_is_idempotent(self, session, user):
        key, secret = keys.create_key(user, name="ci")
        for _ in range(2):
            response = session.delete(f"/api/v1/api-keys/{key.pk}")
            assert (response.status_code, response.content) == (204, b"")
            assert refused(bearing(secret).get("/api/public/v1/key"))
        item = session.get("/api/v1/api-keys").json()["items"][0]
        assert item["revokedAt"] is not None

    def test_the_time_of_the_first_revocation_is_kept(self, session, user):
        key, _ = keys.create_key(user, name="ci")
        session.delete(f"/api/v1/api-keys/{key.pk}")
        key.refresh_from_db()
        first = key.revoked_at
        session.delete(f"/api/v1/api-keys/{key.pk}")
        key.refresh_from_db()
        assert key.revoked_at == first


class TestUse:
    def test_a_key_can_read_its_own_data(self, user):
        key, secret = keys.create_key(user, name="ci")
        assert bearing(secret).get("/api/public/v1/key").json() == {
            "name": "ci",
            "prefix": secret[:8],
            "scopes": key.scopes,
            "expiresAt": clock.iso(key.expires_at),
        }

    def test_a_key_without_scopes_can_read_its_own_data(self, user):
        assert factories.public_client(user, scopes=[]).get("/api/public/v1/key").json()["scopes"] == []

    def test_an_inactive_user_s_key_is_refused(self, user):
        _, secret = keys.create_key(user, name="ci")
        user.is_active = False
        user.save()
        assert refused(bearing(secret).get("/api/public/v1/key"))
        assert ApiKey.objects.get().last_used_at is None

    def test_the_last_use_is_written_once_a_minute(self, user, django_assert_num_queries):
        key, secret = keys.create_key(user, name="ci")
        client = bearing(secret)
        clock.sync()  # on PostgreSQL the clock sometimes makes a query
        with django_assert_num_queries(2):
            client.get("/api/public/v1/key")
        key.refresh_from_db()
        first = key.last_used_at
        assert first is not None
        with django_assert_num_queries(1):
            client.get("/api/public/v1/key")
        old = first - timedelta(seconds=keys.API_KEY_LAST_USED_SECONDS + 1)
        ApiKey.objects.filter(pk=key.pk).update(last_used_at=old)
        client.get("/api/public/v1/key")
        key.refresh_from_db()
        assert key.last_used_at >= first

    def test_a_key_is_accepted_while_the_database_is_busy(self, user, monkeypatch):
        _, secret = keys.create_key(user, name="ci")

        def busy(key) -> None:
            raise OperationalError("database is locked")

        monkeypatch.setattr(keys, "note_use", busy)
        assert bearing(secret).get("/api/public/v1/key").status_code == 200


@pytest.mark.django_db(transaction=True)
def test_one_of_several_concurrent_uses_is_written():
    user = factories.UserFactory()
    key, secret = keys.create_key(user, name="ci")
    found = [keys.find_key(secret) for _ in range(6)]
    side_by_side(6, lambda number: keys.note_use(found[number]))
    key.refresh_from_db()
    first = key.last_used_at
    keys.note_use(found[0])  # this object was loaded before the first use
    key.refresh_from_db()
    assert key.last_used_at == first


class TestAdmin:
    @pytest.fixture
    def staff(self, client):
        client.force_login(factories.UserFactory(is_staff=True, is_superuser=True))
        return client

    def test_staff_can_narrow_a_key(self, staff, user):
        key, secret = keys.create_key(user, name="ci")
        assert key.digest not in staff.get(reverse("admin:apikeys_apikey_change", args=[key.pk])).content.decode()
        body = {"_selected_action": [key.pk], "step": "confirm", "scopes": ["runs:read"]}
        assert staff.post(reverse("admin:apikeys_apikey_do", args=["narrow"]), body).status_code == 302
        assert bearing(secret).get("/api/public/v1/key").json()["scopes"] == ["runs:read"]

    def test_staff_can_revoke_but_not_make_or_delete(self, staff, user):
        key, secret = keys.create_key(user, name="ci")
        body = {"_selected_action": [key.pk], "step": "confirm"}
        staff.post(reverse("admin:apikeys_apikey_do", args=["revoke"]), body)
        assert refused(bearing(secret).get("/api/public/v1/key"))
        assert "Revoked." in staff.get(reverse("admin:apikeys_apikey_history", args=[key.pk])).content.decode()
        assert staff.get(reverse("admin:apikeys_apikey_add")).status_code == 403
        assert staff.post(reverse("admin:apikeys_apikey_delete", args=[key.pk])).status_code == 403
