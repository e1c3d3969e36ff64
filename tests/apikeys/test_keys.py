"""The secrets of API keys: their form, their checksum and their stored digest."""

import hashlib
import re

import pytest

from apikeys import keys
from apikeys.models import ApiKey
from config.kernel import clock
from config.kernel.errors import Conflict
from tests import factories
from tests.threads import side_by_side

pytestmark = pytest.mark.django_db


def test_a_secret_has_the_documented_shape(user):
    key, secret = keys.create_key(user, name="ci")
    assert re.fullmatch(r"awk_[0-9A-Za-z]{49}", secret)
    assert key.prefix == secret[:8]
    assert key.scopes == [
        "chats:read",
        "chats:write",
        "runs:read",
        "runs:write",
        "waitpoints:respond",
        "attachments:write",
        "credits:read",
    ]


def test_only_a_digest_is_stored(user):
    key, secret = keys.create_key(user, name="ci")
    row = ApiKey.objects.values().get(pk=key.pk)
    assert row["digest"] == hashlib.sha256(secret.encode()).hexdigest()
    assert not any(secret[8:] in str(value) for value in row.values())


def test_secrets_differ():
    assert len({keys.new_secret() for _ in range(100)}) == 100


def test_a_mistyped_secret_causes_no_query(user, django_assert_num_queries):
    _, secret = keys.create_key(user, name="ci")
    with django_assert_num_queries(0):
        for place in range(len(secret)):
            wrong = "x" if secret[place] != "x" else "y"
            assert keys.find_key(secret[:place] + wrong + secret[place + 1 :]) is None
            if place + 1 < len(secret) and secret[place] != secret[place + 1]:
                swapped = secret[:place] + secret[place + 1] + secret[place] + secret[place + 2 :]
                assert keys.find_key(swapped) is None
        for odd in ("", "awk_", secret + "x", secret[:-1], secret + "\n", secret.upper(), "ключ"):
            assert keys.find_key(odd) is None


def test_a_well_formed_unknown_secret_is_not_found(user, django_assert_num_queries):
    keys.create_key(user, name="ci")
    with django_assert_num_queries(1):
        assert keys.find_key(keys.new_secret()) is None


def test_the_key_and_its_user_are_read_in_one_query(user, django_assert_num_queries):
    key, secret = keys.create_key(user, name="ci")
    with django_assert_num_queries(1):
        found = keys.find_key(secret)
        assert found is not None
        assert (found.pk, found.user.pk) == (key.pk, user.pk)


def test_the_number_of_live_keys_is_limited(user, monkeypatch):
    monkeypatch.setattr("apikeys.keys.API_KEY_MAX_LIVE", 2)
    first, _ = keys.create_key(user, name="1")
    keys.create_key(user, name="2", expiration_days=1)
    keys.create_key(factories.UserFactory(), name="another user's")
    with pytest.raises(Conflict):
        keys.create_key(user, name="3")
    keys.revoke_key(first)
    keys.create_key(user, name="3", expiration_days=2)
    with pytest.raises(Conflict):
        keys.create_key(user, name="4")
    ApiKey.objects.filter(name="2").update(expires_at=clock.now())
    keys.create_key(user, name="4")


@pytest.mark.django_db(transaction=True)
def test_concurrent_requests_do_not_exceed_the_limit(monkeypatch):
    monkeypatch.setattr("apikeys.keys.API_KEY_MAX_LIVE", 3)
    user = factories.UserFactory()

    def create(number: int) -> bool:
        try:
            keys.create_key(user, name=str(number))
        except Conflict:
            return False
        return True

    assert sum(side_by_side(10, create)) == 3
    assert ApiKey.objects.count() == 3
