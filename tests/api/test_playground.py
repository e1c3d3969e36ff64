"""``/playground`` without a browser: who sees the page, its policy, its libraries, and the code of ``make run``."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import jwt
import pytest
from botocore.loaders import create_loader
from django.contrib.auth import get_user_model
from django.contrib.staticfiles import finders
from django.core import signing

from config.api import sign_in_codes
from config.storage import ObjectStorage

pytestmark = pytest.mark.django_db


@pytest.fixture
def shown(settings):
    settings.PLAYGROUND, settings.PLAYGROUND_STAFF_ONLY, settings.EMBEDDED = True, False, True
    settings.SESSION_ISSUER = ""
    return settings


def exchange(client, code):
    return client.post("/playground/sign-in", {"code": code})


def test_the_page_conforms_to_its_content_security_policy(client, shown):
    for path in ("/playground", "/playground/chat_01m7y"):
        answer = client.get(path)
        assert answer.status_code == 200
        page, policy = answer.content.decode(), answer["Content-Security-Policy"]
        assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy
        assert "unsafe" not in policy
        # The policy blocks inline scripts, inline styles and resources of other hosts.
        assert not re.search(r"<style| style=| on\w+=|<script(?! type=\"module\" src=\"/static/)|https?://", page)
    files = re.findall(r'(?:src|href)="/static/([^"]+)"', page)
    assert len(files) >= 5
    assert [name for name in files if finders.find(name) is None] == []


def test_the_page_is_404_unless_it_is_on(client, shown):
    assert client.get("/playground/a%00b").status_code == 404
    shown.PLAYGROUND = False
    for path in ("/playground", "/playground/chat_01m7y"):
        assert client.get(path).status_code == 404
    assert exchange(client, sign_in_codes.make_code()).status_code == 404


def test_in_production_the_page_is_for_staff(client, shown):
    shown.PLAYGROUND_STAFF_ONLY = True
    answer = client.get("/playground/chat_01m7y")
    assert (answer.status_code, answer["Location"]) == (302, "/admin/login/?next=/playground/chat_01m7y")
    client.force_login(get_user_model().objects.create_user("ada"))
    assert client.get("/playground").status_code == 302
    client.force_login(get_user_model().objects.create_user("olga", is_staff=True))
    assert client.get("/playground").status_code == 200


def test_uploads_may_go_to_the_object_storage(client, shown):
    shown.STORAGE_S3_BUCKET, shown.STORAGE_S3_ENDPOINT = "files", "https://s3.example.com:9000"
    policy = client.get("/playground")["Content-Security-Policy"]
    assert "connect-src 'self' https://s3.example.com:9000/files/ https://files.s3.example.com:9000/;" in policy


@pytest.fixture(scope="module")
def one_loader() -> Iterator[None]:
    """Each client of the SDK would otherwise read its description of S3 from the disk again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("botocore.session.create_loader", cache(create_loader))
        yield


@pytest.mark.parametrize("bucket", ["files", "our.files"])
@pytest.mark.parametrize("region", ["us-east-1", "eu-central-1", "cn-north-1", "us-gov-west-1"])
@pytest.mark.parametrize("addressing", ["auto", "path", "virtual"])
@pytest.mark.parametrize("endpoint", ["", "http://127.0.0.1:9000"])
def test_uploads_go_to_the_own_bucket_only(client, shown, one_loader, bucket, region, addressing, endpoint):
    shown.STORAGE_S3_BUCKET, shown.STORAGE_S3_REGION, shown.STORAGE_S3_ENDPOINT = bucket, region, endpoint
    shown.STORAGE_S3_ADDRESSING, shown.STORAGE_S3_ACCESS_KEY, shown.STORAGE_S3_SECRET_KEY = addressing, "key", "secret"
    sources = re.search(r"connect-src 'self'([^;]*);", client.get("/playground")["Content-Security-Policy"])[1].split()
    url, _ = ObjectStorage().presign_put("a.txt", content_type="text/plain", size=1, sha256=None, seconds=60)
    assert any(url.startswith(source) for source in sources), (url, sources)
    # A source that ends in "/" allows what begins with it.
    assert all(source.endswith("/") and bucket in source and "*" not in source for source in sources)


def test_the_code_of_make_run_signs_in(client, shown):
    token = exchange(client, sign_in_codes.make_code()).json()["token"]
    answer = client.get("/api/v1/me", headers={"Authorization": f"Bearer {token}"})
    assert answer.json()["username"] == "demo"


def test_the_code_s_tokens_end_with_the_code(client, shown, monkeypatch):
    begun = 2_000_000_000
    monkeypatch.setattr(time, "time", lambda: begun)
    code = sign_in_codes.make_code()
    for age, status in ((0, 200), (12 * 3600 - 60, 200), (12 * 3600, 404), (24 * 3600, 404)):
        monkeypatch.setattr(time, "time", lambda age=age: begun + age)
        answer = exchange(client, code)
        assert answer.status_code == status
        if status == 200:
            claims = jwt.decode(answer.json()["token"], options={"verify_signature": False})
            assert claims["exp"] == begun + 12 * 3600


@pytest.mark.parametrize(("name", "value"), [("EMBEDDED", False), ("SESSION_ISSUER", "https://id.example.com")])
def test_a_code_is_good_for_nothing_elsewhere(client, shown, name, value):
    code = sign_in_codes.make_code()
    setattr(shown, name, value)
    assert exchange(client, code).status_code == 404


def test_other_codes_are_refused(client, shown):
    code = sign_in_codes.make_code()
    for wrong in ("", "demo", code[:-1], code.replace("demo", "root"), "x" * 100_000, "\0"):
        assert exchange(client, wrong).status_code == 404
    assert client.get("/playground/sign-in").status_code == 405
    of_older_versions = signing.TimestampSigner(salt=sign_in_codes.__name__).sign("demo")
    assert exchange(client, of_older_versions).status_code == 404


@pytest.mark.parametrize("changes", [{"is_staff": True}, {"is_active": False}])
def test_a_code_never_stands_for_staff_or_an_inactive_user(client, shown, changes):
    get_user_model().objects.create_user("demo", **changes)
    token = exchange(client, sign_in_codes.make_code()).json()["token"]
    assert client.get("/api/v1/me", headers={"Authorization": f"Bearer {token}"}).status_code == 401


def test_the_libraries_are_those_of_the_table():
    folder = Path(finders.find("playground/vendor/README.md")).parent
    table = dict(re.findall(r"^\| `([^`]+)` .* `(\w{64})` \|$", (folder / "README.md").read_text(), re.MULTILINE))
    assert {path.name for path in folder.glob("*.*js")} == set(table)
    for name, digest in table.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name


def test_own_scripts_and_styles_have_at_most_400_lines():
    folder = Path(finders.find("playground/main.js")).parent
    assert [path.name for path in folder.glob("*.*") if len(path.read_text().splitlines()) > 400] == []
