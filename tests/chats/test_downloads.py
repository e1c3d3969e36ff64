"""Downloads of attachments: headers, ranges and conditional requests (RFC 9110, RFC 6266)."""

import logging

import pytest
from django.core.files.storage import default_storage

from chats.models import Attachment
from chats.views import byte_range, content_disposition
from tests import factories
from tests.chats.conftest import code

pytestmark = pytest.mark.django_db
CONTENT = bytes(range(256)) * 1000


@pytest.fixture
def row(user):
    return factories.AttachmentFactory(user=user, content=CONTENT, file_name="Grüße.png", content_type="image/png")


@pytest.fixture
def get(session, row):
    def call(method="get", **headers):
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        return getattr(session, method)(f"/api/v1/attachments/{row.pk}/content", headers=names)

    return call


def body(response):
    return b"".join(response.streaming_content)


def test_the_whole_file(get, row):
    response = get()
    assert response.status_code == 200
    assert body(response) == CONTENT
    assert response["Content-Type"] == "image/png"
    assert response["Content-Length"] == str(len(CONTENT))
    assert response["Content-Disposition"] == "attachment; filename*=utf-8''Gr%C3%BC%C3%9Fe.png"
    assert response["X-Content-Type-Options"] == "nosniff"
    assert response["Content-Security-Policy"] == "sandbox; default-src 'none'"
    assert response["Cache-Control"] == "private, no-cache"
    assert response["Accept-Ranges"] == "bytes"
    assert response["ETag"] == f'"{row.sha256}"'
    assert "Content-Range" not in response


@pytest.mark.parametrize(
    ("kind", "served"),
    [
        ("text/html", "text/html; charset=utf-8"),
        ("text/csv", "text/csv; charset=utf-8"),
        ("application/json", "application/json"),
        ("application/pdf", "application/pdf"),
    ],
)
def test_the_content_type_of_a_download(session, user, kind, served):
    row = factories.AttachmentFactory(user=user, content_type=kind)
    response = session.get(f"/api/v1/attachments/{row.pk}/content")
    assert response["Content-Type"] == served
    assert response["Content-Disposition"].startswith("attachment;")
    assert "sandbox" in response["Content-Security-Policy"]
    response.close()


def test_the_accept_header_is_ignored(get):
    for accept in ("image/png", "text/html", "application/xml;q=0.1", ""):
        assert get(Accept=accept).status_code == 200


def test_head_returns_the_headers_only(get):
    response = get("head")
    assert (response.status_code, response.content, response["Content-Length"]) == (200, b"", str(len(CONTENT)))
    part = get("head", Range="bytes=0-9")
    assert (part.status_code, part["Content-Length"]) == (206, "10")


LAST = len(CONTENT) - 1


@pytest.mark.parametrize(
    ("wanted", "first", "last"),
    [
        ("bytes=0-0", 0, 0),
        ("bytes=0-99", 0, 99),
        ("bytes=100-", 100, LAST),
        (f"bytes={LAST}-", LAST, LAST),
        ("bytes=-1", LAST, LAST),
        ("bytes=-300", LAST - 299, LAST),
        ("bytes=-999999999", 0, LAST),
        ("bytes=0-999999999999999", 0, LAST),
        ("bytes=70000-200000", 70000, 200000),
        ("Bytes= 5-6 ", 5, 6),
    ],
)
def test_a_range(get, wanted, first, last):
    response = get(Range=wanted)
    assert response.status_code == 206
    assert response["Content-Range"] == f"bytes {first}-{last}/{len(CONTENT)}"
    assert response["Content-Length"] == str(last - first + 1)
    assert body(response) == CONTENT[first : last + 1]


@pytest.mark.parametrize("wanted", [f"bytes={LAST + 1}-", "bytes=999999999-9999999999", "bytes=-0"])
def test_an_unsatisfiable_range(get, wanted):
    response = get(Range=wanted)
    assert code(response) == (416, "REQUESTED_RANGE_NOT_SATISFIABLE")
    assert response["Content-Range"] == f"bytes */{len(CONTENT)}"


@pytest.mark.parametrize(
    "wanted",
    ["bytes=0-1,5-6", "bytes=5-2", "bytes=-", "bytes=", "bytes", "items=0-5", "0-5", "bytes=a-b", "bytes=1.5-2",
     "bytes=--5", "bytes=" + "9" * 5000 + "-"],
)  # fmt: skip
def test_a_header_that_is_not_a_single_range_is_ignored(get, wanted):
    response = get(Range=wanted)
    assert response.status_code == 200
    assert body(response) == CONTENT


def test_only_ascii_digits_are_a_range():
    assert byte_range("bytes=3-4", 100) == (3, 4)
    assert byte_range("bytes=٣-٤", 100) is None


def test_if_range(get, row):
    assert get(Range="bytes=0-9", If_Range=f'"{row.sha256}"').status_code == 206
    for stale in ('"other"', f'W/"{row.sha256}"', "Sat, 21 Nov 2026 00:00:00 GMT"):
        assert get(Range="bytes=0-9", If_Range=stale).status_code == 200


def test_if_none_match(get, row):
    for known in (f'"{row.sha256}"', f'W/"{row.sha256}"', f'"x", "{row.sha256}"', "*"):
        response = get(If_None_Match=known)
        assert (response.status_code, response.content, response["ETag"]) == (304, b"", f'"{row.sha256}"')
    assert get(If_None_Match='"other"').status_code == 200


def test_an_attachment_without_a_file_is_404(session, user):
    row = factories.AttachmentFactory(user=user, status="PENDING")
    assert code(session.get(f"/api/v1/attachments/{row.pk}/content")) == (404, "NOT_FOUND")


@pytest.mark.parametrize("surface", ["v1", "public/v1"])
def test_a_deleted_chat_or_an_inactive_user_ends_access_at_once(user, row, surface):
    client = factories.session_client(user) if surface == "v1" else factories.public_client(user)
    message = factories.MessageFactory(chat__user=user)
    Attachment.objects.filter(pk=row.pk).update(message=message)
    paths = [f"/api/{surface}/attachments/{row.pk}{part}" for part in ("", "/content")]
    assert [client.get(path).status_code for path in paths] == [200, 200]
    user.is_active = False
    user.save()
    assert [client.get(path).status_code for path in paths] == [401, 401]
    user.is_active = True
    user.save()
    assert client.delete(f"/api/{surface}/chats/{message.chat_id}").status_code == 204
    assert [client.get(path).status_code for path in paths] == [404, 404]


def test_a_lost_file_is_404(get, row):
    default_storage.delete(row.stored_name)
    assert code(get()) == (404, "NOT_FOUND")


def test_a_storage_failure_is_503(get, monkeypatch, caplog):
    def fail(*args):
        raise OSError("away: s3cret")

    monkeypatch.setattr(default_storage, "open", fail)
    with caplog.at_level(logging.CRITICAL):
        response = get()
    assert code(response) == (503, "UNAVAILABLE")
    assert b"s3cret" not in response.content


def test_files_are_closed_after_a_partial_read(get, monkeypatch):
    opened = []
    opening = default_storage.open
    monkeypatch.setattr(default_storage, "open", lambda name: opened.append(opening(name)) or opened[-1])
    unread, partly, whole = get(), get(), get()
    next(iter(partly.streaming_content))
    body(whole)
    for response in (unread, partly, whole):
        response.close()
    assert [file.closed for file in opened] == [True, True, True]


@pytest.mark.parametrize(
    ("name", "header"),
    [
        ("a.txt", 'attachment; filename="a.txt"'),
        ("a b.txt", 'attachment; filename="a b.txt"'),
        ('a"b\\c/d:e.txt', 'attachment; filename="a_b_c_d_e.txt"'),
        ("a\r\nSet-Cookie: x", 'attachment; filename="a__Set-Cookie_ x"'),
        ("é", "attachment; filename*=utf-8''%C3%A9"),
        ("gnp\u202eexe.txt", 'attachment; filename="gnp_exe.txt"'),
        ("..", 'attachment; filename="file"'),
        (" . ", 'attachment; filename="file"'),
    ],
    ids=ascii,
)
def test_content_disposition(name, header):
    assert content_disposition(name) == header
