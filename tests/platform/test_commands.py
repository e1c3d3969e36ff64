"""The command ``manage.py session_token``."""

from io import StringIO

import pytest
from django.contrib.auth import get_user_model
from django.core.management import CommandError, call_command
from rest_framework.test import APIClient

from config.api import session_tokens
from tests import factories

pytestmark = pytest.mark.django_db


def run(*args: str) -> str:
    out = StringIO()
    call_command("session_token", *args, stdout=out, stderr=StringIO())
    return out.getvalue()


def test_it_prints_a_valid_token(user):
    token = run(user.username).splitlines()[-1]
    client = APIClient()
    client.credentials(HTTP_AUTHORIZATION=f"Bearer {token}")
    assert client.get("/api/v1/me").json()["id"] == str(user.pk)


def test_create_creates_the_user_once():
    for _ in range(2):
        run("newcomer", "--create")
    assert get_user_model().objects.filter(username="newcomer").count() == 1


@pytest.mark.parametrize(("args", "hours"), [((), 12), (("--hours", "1"), 1), (("--hours", "0.5"), 0.5)])
def test_the_lifetime_of_the_token(user, args, hours):
    claims = session_tokens.verify(run(user.username, *args).splitlines()[-1])
    assert claims["exp"] - claims["iat"] == hours * 3600


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("nobody",), "Add --create"),
        (("", "--create"), "not a username"),
        (("x" * 151, "--create"), "not a username"),
        (("a\nb", "--create"), "not a username"),
        (("nobody", "--hours", "0"), "--hours"),
        (("nobody", "--hours", "-1"), "--hours"),
        (("nobody", "--hours", "nan"), "--hours"),
        (("nobody", "--hours", "1e9"), "--hours"),
        (("nobody", "--hours", "soon"), "--hours"),
    ],
)
def test_invalid_arguments_are_a_clear_error(args, words):
    with pytest.raises(CommandError, match=words):
        run(*args)
    assert not get_user_model().objects.exists()


def test_an_inactive_user_gets_no_token():
    factories.UserFactory(username="gone", is_active=False)
    with pytest.raises(CommandError, match="not active"):
        run("gone")


def test_it_fails_if_an_identity_provider_is_set(user, settings):
    settings.SESSION_ISSUER = "https://id.example.com/"
    with pytest.raises(CommandError, match=r"id\.example\.com"):
        run(user.username)
