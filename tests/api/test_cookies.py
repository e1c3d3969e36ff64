"""The API ignores session cookies. Pages still use them."""

import pytest
from django.conf import settings
from django.contrib.auth import get_user_model
from django.test import Client

pytestmark = pytest.mark.django_db

PATHS = ["/api/v1/me", "/api/public/v1/key", "/api/schema", "/api/docs", "/api/nothing", "/api"]


@pytest.fixture
def staff() -> Client:
    person = get_user_model()._default_manager.create_superuser("boss", password="a long enough password")
    client = Client()
    client.force_login(person)
    return client


@pytest.mark.parametrize("path", PATHS)
def test_the_api_ignores_a_session_cookie(staff, path):
    with_cookie, without = staff.get(path), Client().get(path)
    assert with_cookie.status_code == without.status_code
    assert set(with_cookie.headers) == set(without.headers)
    assert not with_cookie.cookies
    assert "Cookie" not in with_cookie.get("Vary", "")


@pytest.mark.parametrize("path", PATHS)
def test_the_api_ignores_an_invalid_session_cookie(path):
    client = Client()
    client.cookies[settings.SESSION_COOKIE_NAME] = "?"
    answer = client.get(path)
    assert not answer.cookies
    assert "Cookie" not in answer.get("Vary", "")


def test_signed_in_staff_need_a_token_for_the_api(staff):
    assert staff.get("/admin/").status_code == 200
    assert staff.get("/api/v1/me").status_code == 401


def test_pages_keep_their_session(staff):
    assert staff.get("/admin/").wsgi_request.user.username == "boss"
    answer = Client().get("/admin/")
    assert answer.status_code == 302
    assert "Cookie" in answer["Vary"]
