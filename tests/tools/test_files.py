"""Tests of the files that tools create: their names, their addresses and their downloads."""

import re
import threading
from unittest import mock

import pytest
from django.core.files.storage import default_storage
from django.db import OperationalError
from django.test import Client, override_settings

from chats import services
from config.api.ratelimit import Verdict
from config.kernel.errors import NotFound
from runs.models import ToolInvocation
from runs.pages import serve_file
from runs.tools import files
from runs.tools.base import ToolFailure
from tests import factories

pytestmark = pytest.mark.django_db
BASE = "https://agents.example"


@pytest.fixture(autouse=True)
def invocation():
    """The call of the context."""
    return factories.ToolInvocationFactory(id="inv_1")


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
    assert re.fullmatch(rf"{BASE}/files/inv_1/[0-9a-f]{{64}}/Bericht%201\.md", url)
    response = get(client, url)
    assert response.status_code == 200
    assert body(response) == "# Größe 😀\n".encode()
    assert response["Content-Type"] == "text/markdown; charset=utf-8"
    assert response["Content-Length"] == str(len("# Größe 😀\n".encode()))
    assert response["Content-Disposition"] == 'attachment; filename="Bericht 1.md"'
    assert response["X-Content-Type-Options"] == "nosniff"
    assert "sandbox" in response["Content-Security-Policy"]
    assert "default-src 'none'" in response["Content-Security-Policy"]
    assert response["Cache-Control"] == "private, no-cache"


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
    assert body(response) == b""
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


def test_a_bad_file_name_is_refused_and_nothing_is_written(call, storage, subtests):
    for name in [*BAD_NAMES, "", "a\x00.txt"]:
        with subtests.test(ascii(name)):
            with pytest.raises(ToolFailure) as failure:
                call("create_file", {"fileName": name, "content": "x"})
            assert failure.value.code == "INVALID_INPUT"
            assert list(storage.rglob("*")) == []


@pytest.mark.parametrize("name", ["a", "a.txt", "Übersicht (2).csv", "a..b", "2026-11-20_report+x@y=1,2.md", "漢" * 66])
def test_valid_file_names_are_accepted(call, client, name):
    assert body(get(client, call("create_file", {"fileName": name, "content": "x"}).urls[0])) == b"x"


def test_path_outside_the_folder_is_not_found(storage, rf, subtests):
    token = "0" * 64
    (storage / "tools" / "inv_1" / token).mkdir(parents=True)
    (storage / "a.txt").write_text("outside")
    for name in [*BAD_NAMES, "missing.txt", "a" * 10_000]:
        with subtests.test(ascii(name[:100])), pytest.raises(NotFound):
            serve_file(rf.get("/"), "inv_1", token, name)


@pytest.mark.parametrize(
    "token", ["..", ".", "", "0" * 63, "G" * 64, "0" * 64, "../tools", "\x00", "٠" * 64, "0" * 64 + "\n"]
)
def test_unknown_tokens_are_not_found(rf, storage, token):
    (storage / "tools" / "inv_1").mkdir(parents=True)
    (storage / "tools" / "inv_1" / "a.txt").write_text("x")
    with pytest.raises(NotFound):
        serve_file(rf.get("/"), "inv_1", token, "a.txt")


def test_a_folder_is_not_a_file(rf, storage):
    (storage / "tools" / "inv_1" / ("0" * 64) / "a").mkdir(parents=True)
    with pytest.raises(NotFound):
        serve_file(rf.get("/"), "inv_1", "0" * 64, "a")


@pytest.mark.parametrize(
    "invocation_id", ["..", "", ".", "inv_2", "inv_1\0", "inv_1/..", "a" * 10_000, "../tools/inv_1"]
)
def test_unknown_calls_are_not_found(rf, call, invocation_id):
    token, name = call("create_file", {"fileName": "a.txt", "content": "x"}).urls[0].split("/")[-2:]
    assert serve_file(rf.get("/"), "inv_1", token, name).status_code == 200
    with pytest.raises(NotFound):
        serve_file(rf.get("/"), invocation_id, token, name)


def test_another_calls_id_does_not_open_a_file(rf, call, client):
    """A user with a call cannot read a file of a deleted chat by its token."""
    token, name = call("create_file", {"fileName": "a.txt", "content": "x"}).urls[0].split("/")[-2:]
    factories.ToolInvocationFactory(id="inv_2")
    with pytest.raises(NotFound):
        serve_file(rf.get("/"), "inv_2", token, name)


def test_a_deleted_chat_ends_access_at_once(call, client, invocation):
    (url,) = call("create_file", {"fileName": "a.txt", "content": "abc"}).urls
    assert body(get(client, url)) == b"abc"
    services.delete_chat(invocation.run.chat)
    for answer in (get(client, url), client.head(url.removeprefix(BASE))):
        assert answer.status_code == 404
    # Also before the file is purged, and also for a chat whose rows are gone.
    ToolInvocation.objects.all().delete()
    assert get(client, url).json()["error"]["code"] == "NOT_FOUND"


def test_an_inactive_user_ends_access_at_once(call, client, invocation):
    (url,) = call("create_file", {"fileName": "a.txt", "content": "abc"}).urls
    user = invocation.run.user
    user.is_active = False
    user.save()
    assert get(client, url).status_code == 404
    user.is_active = True
    user.save()
    assert body(get(client, url)) == b"abc"


def test_wrong_addresses_count_against_the_clients_address(call, client, settings):
    (url,) = call("create_file", {"fileName": "a.txt", "content": "abc"}).urls
    verdicts = [Verdict(True, 1), Verdict(False, 1, retry_after=7)]
    with mock.patch("config.api.ratelimit.charge_address", side_effect=verdicts):
        assert get(client, f"{url}x").status_code == 404
        over = get(client, f"{url}x")
        assert (over.status_code, over["Retry-After"]) == (429, "7")
        assert get(client, url).status_code == 200  # signed addresses are not charged


def test_a_database_that_is_away_is_503(call, client):
    (url,) = call("create_file", {"fileName": "a.txt", "content": "x"}).urls
    with mock.patch("runs.pages.ToolInvocation.objects.filter", side_effect=OperationalError("secret")):
        answer = get(client, url)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "UNAVAILABLE")
    assert "secret" not in answer.content.decode()


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


def test_a_storage_that_does_not_answer_is_503(call, client, caplog):
    (url,) = call("create_file", {"fileName": "a.txt", "content": "x"}).urls
    with mock.patch.object(default_storage, "open", side_effect=ConnectionError("http://key:secret@storage")):
        answer = get(client, url)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "UNAVAILABLE")
    assert "a download failed" in caplog.text
    assert "secret" not in answer.content.decode()


@pytest.mark.parametrize("listing", [1, 2, 3])
def test_files_that_another_process_removes_meanwhile(monkeypatch, listing):
    """The other process removes all after this one has listed the ``listing``-th folder."""
    for name in ("a.txt", "b.txt"):
        files.store("inv_1", name, b"x")
    listdir, listings = default_storage.listdir, []

    def interrupted(folder):
        found = listdir(folder)
        listings.append(folder)
        if len(listings) == listing:
            files.remove_all("inv_1")
        return found

    monkeypatch.setattr(default_storage, "listdir", interrupted)
    files.remove_all("inv_1")
    assert len(listings) >= listing
    assert not default_storage.exists(f"{files.FOLDER}/inv_1")
