"""``/playground`` without a browser: who sees the page, its policy, its libraries, and tokens in its address."""

import hashlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from botocore.loaders import create_loader
from django.contrib.auth import get_user_model
from django.contrib.staticfiles import finders

from config.storage import ObjectStorage

pytestmark = pytest.mark.django_db


@pytest.fixture
def shown(settings):
    settings.PLAYGROUND, settings.PLAYGROUND_STAFF_ONLY, settings.EMBEDDED = True, False, True
    settings.SESSION_ISSUER = ""
    return settings


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


@pytest.mark.parametrize(("name", "value"), [("EMBEDDED", False), ("SESSION_ISSUER", "https://id.example.com")])
def test_a_token_in_the_address_signs_in_to_the_embedded_default_only(client, shown, name, value):
    assert b'data-local="true"' in client.get("/playground").content
    setattr(shown, name, value)
    assert b"data-local" not in client.get("/playground").content


def test_the_libraries_are_those_of_the_table():
    folder = Path(finders.find("playground/vendor/README.md")).parent
    table = dict(re.findall(r"^\| `([^`]+)` .* `(\w{64})` \|$", (folder / "README.md").read_text(), re.MULTILINE))
    assert {path.name for path in folder.glob("*.*js")} == set(table)
    for name, digest in table.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name


def test_own_scripts_and_styles_have_at_most_400_lines():
    folder = Path(finders.find("playground/main.js")).parent
    assert [path.name for path in folder.glob("*.*") if len(path.read_text().splitlines()) > 400] == []
