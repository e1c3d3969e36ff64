"""Tests of the files that tools create: their names, their addresses and their downloads."""

import re
import threading
from unittest import mock

import pytest
from django.core.files.storage import default_storage
from django.test import Client, override_settings
from django.urls import path

from runs.tools import files
from runs.tools.base import ToolFailure

urlpatterns = [path("files/<str:token>/<str:file_name>", files.serve_file)]
# At the end of an answer Django checks every open database connection, also those of earlier tests.
pytestmark = [pytest.mark.urls(__name__), pytest.mark.django_db]
BASE = "https://agents.example"


@pytest.fixture
def client():
    return Client(headers={"host": "localhost"})


def get(client, url, **extra):
    assert url.startswith(f"{BASE}/files/")
    return client.get(url.removeprefix(BASE), **extra)


def body(response):
    return b"".join(response.streaming_content)


def test_a_created_file_can_be_downloaded(call, client):
    result = call("create_file", {"fileName": "Bericht 1.md", "content": "# Größe 😀\n"})
    (url,) = result.urls
    assert url in result.text
    assert re.fullmatch(rf"{BASE}/files/[0-9a-f]{{64}}/Bericht%201\.md", url)
    response = get(client, url)
    assert response.status_code == 200
    assert body(response) == "# Größe 😀\n".encode()
    assert response["Content-Type"] == "text/markdown; charset=utf-8"
    assert response["Content-Length"] == str(len("# Größe 😀\n".encode()))
    assert response["Content-Disposition"] == 'attachment; filename="Bericht 1.md"'
    assert response["X-Content-Type-Options"] == "nosniff"
    assert "sandbox" in response["Content-Security-Policy"]
    assert "default-src 'none'" in response["Content-Security-Policy"]
    assert response["Cache-Control"] == "private, max-age=3600"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.html", "text/html; charset=utf-8"),
        ("a.SVG", "image/svg+xml"),
        ("a.json", "application/json"),
        ("a.exe", "application/octet-stream"),
        ("html", "text/html; charset=utf-8"),
        ("a", "application/octet-stream"),
    ],
)
def test_files_of_every_type_are_downloads(call, client, name, kind):
    response = get(client, call("create_file", {"fileName": name, "content": "<script>"}).urls[0])
    assert response["Content-Type"] == kind
    assert response["Content-Disposition"].startswith("attachment")
    assert response["X-Content-Type-Options"] == "nosniff"
    assert "sandbox" in response["Content-Security-Policy"]
    response.close()


def test_head_has_the_headers_only(call, client):
    url = call("create_file", {"fileName": "a.txt", "content": "abc"}).urls[0]
    response = client.head(url.removeprefix(BASE))
    assert (response.status_code, response["Content-Length"]) == (200, "3")
    response.close()


@pytest.mark.parametrize("method", ["post", "put", "delete", "patch"])
def test_other_methods_are_refused(call, client, method):
    url = call("create_file", {"fileName": "a.txt", "content": "abc"}).urls[0]
    response = getattr(Client(headers={"host": "localhost"}), method)(url.removeprefix(BASE))
    assert response.status_code == 405
    assert response.json()["error"]["code"] == "METHOD_NOT_ALLOWED"
    assert response["Allow"] == "GET, HEAD"


def test_a_repeated_call_replaces_its_own_file(call, client, storage):
    first = call("create_file", {"fileName": "a.txt", "content": "half"}).urls
    again = call("create_file", {"fileName": "a.txt", "content": "whole"}).urls
    assert first == again
    assert body(get(client, first[0])) == b"whole"
    assert len([file for file in storage.rglob("*") if file.is_file()]) == 1


def test_each_invocation_and_name_has_its_own_address(storage):
    urls = {files.store(invocation, name, b"x") for invocation in ("inv_1", "inv_2") for name in ("a.txt", "b.txt")}
    assert len({url.split("/")[-2] for url in urls}) == 4


def test_address_cannot_be_derived_from_the_invocation_id(storage):
    url = files.store("inv_1", "a.txt", b"x")
    with override_settings(SECRET_KEY="another"):
        assert files.store("inv_1", "a.txt", b"x") != url


def test_addresses_stay_valid_after_a_change_of_the_secret_key(call, client):
    url = call("create_file", {"fileName": "a.txt", "content": "abc"}).urls[0]
    with override_settings(SECRET_KEY="another", SECRET_KEY_FALLBACKS=[]):
        assert body(get(client, url)) == b"abc"


BAD_NAMES = [
    "../a.txt",
    "..",
    ".",
    ".htaccess",
    "a/b.txt",
    "/etc/passwd",
    "a\\b.txt",
    "C:\\a.txt",
    "a\n.txt",
    "a.txt\n",
    "a\u202etxt.exe",
    "a\u200b.txt",
    "a\t.txt",
    "a?.txt",
    "a%2f.txt",
    "a:b",
    'a".txt',
    "a<b>.txt",
    " a.txt",
    "a.txt ",
    "a.",
    "-rf",
    "~root",
    "a" * 101,
    "漢" * 67,
]


@pytest.mark.parametrize("name", [*BAD_NAMES, "", "a\x00.txt"])
def test_a_bad_file_name_is_refused_and_nothing_is_written(call, storage, name):
    with pytest.raises(ToolFailure) as failure:
        call("create_file", {"fileName": name, "content": "x"})
    assert failure.value.code == "INVALID_INPUT"
    assert list(storage.rglob("*")) == []
    with pytest.raises(ValueError, match="name"):
        files.store("inv_1", name, b"x")


@pytest.mark.parametrize("name", ["a", "a.txt", "Übersicht (2).csv", "a..b", "2026-11-20_report+x@y=1,2.md", "漢" * 66])
def test_valid_file_names_are_accepted(call, client, name):
    assert body(get(client, call("create_file", {"fileName": name, "content": "x"}).urls[0])) == b"x"


@pytest.mark.parametrize("name", [*BAD_NAMES, "missing.txt", "a" * 10_000])
def test_path_outside_the_folder_is_not_found(client, storage, rf, name):
    (storage / "tools").mkdir()
    (storage / "a.txt").write_text("outside")
    token = "0" * 64
    (storage / "tools" / token).mkdir()
    response = files.serve_file(rf.get("/"), token, name)
    assert response.status_code == 404
    assert b'"NOT_FOUND"' in response.content


@pytest.mark.parametrize(
    "token", ["..", ".", "", "0" * 63, "G" * 64, "0" * 64, "../tools", "\x00", "٠" * 64, "0" * 64 + "\n"]
)
def test_unknown_tokens_are_not_found(rf, storage, token):
    (storage / "tools").mkdir()
    (storage / "tools" / "a.txt").write_text("x")
    assert files.serve_file(rf.get("/"), token, "a.txt").status_code == 404


def test_a_folder_is_not_a_file(rf, storage):
    (storage / "tools" / ("0" * 64) / "a").mkdir(parents=True)
    assert files.serve_file(rf.get("/"), "0" * 64, "a").status_code == 404


def test_two_concurrent_attempts_store_one_complete_file(storage):
    """The second attempt writes between the check and the save of the first."""
    real_save, meeting = default_storage.save, threading.Event()

    def save_after_the_other(path, content):
        if not meeting.is_set():
            meeting.set()
            real_save(path, content)
        return real_save(path, content)

    with mock.patch.object(default_storage, "save", save_after_the_other):
        files.store("inv_1", "a.txt", b"whole")
    (file,) = [file for file in storage.rglob("*") if file.is_file()]
    assert (file.name, file.read_bytes()) == ("a.txt", b"whole")


def test_a_storage_that_fails_is_a_tool_error(call):
    with (
        mock.patch.object(default_storage, "save", side_effect=OSError("/secret/path: disk full")),
        pytest.raises(ToolFailure) as failure,
    ):
        call("create_file", {"fileName": "a.txt", "content": "x"})
    assert failure.value.code == "TOOL_ERROR"
    assert "secret" not in failure.value.message


def test_a_storage_that_does_not_answer_is_503(call, client):
    (url,) = call("create_file", {"fileName": "a.txt", "content": "x"}).urls
    with mock.patch.object(default_storage, "open", side_effect=ConnectionError("http://key:secret@storage")):
        answer = get(client, url)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "UNAVAILABLE")
    assert "secret" not in answer.content.decode()
