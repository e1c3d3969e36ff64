"""Announcing, uploading and completing attachments on both surfaces (docs/attachments.md)."""

import re
from typing import Any

import pytest

from chats import attachments
from chats import services as chat_services
from chats.models import Attachment
from config.api.models import IdempotencyRecord
from config.kernel import clock
from tests import factories
from tests.chats.conftest import PNG, announce, code, complete, digest, fields, ready, stored, upload
from tests.threads import side_by_side

pytestmark = pytest.mark.django_db


@pytest.fixture(params=["/api/v1", "/api/public/v1"])
def api(request, user):
    client = factories.session_client(user) if request.param == "/api/v1" else factories.public_client(user)
    return client, request.param


def test_a_file_becomes_an_attachment(api, settings):
    client, base = api
    made = announce(client, PNG, base, fileName="Fuchs 🦊.png", contentType="image/png", sha256=digest(PNG).upper())
    assert made.status_code == 201
    answer = made.json()
    shown = {key: value for key, value in answer.items() if key != "upload"}
    assert re.fullmatch(r"att_[0-9a-z]{26}", shown.pop("id"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", shown.pop("createdAt"))
    assert shown == {
        "fileName": "Fuchs 🦊.png",
        "contentType": "image/png",
        "sizeBytes": len(PNG),
        "sha256": digest(PNG),
        "status": "PENDING",
    }
    assert set(answer["upload"]) == {"url", "method", "headers", "expiresAt"}
    assert answer["upload"]["url"].startswith(f"{settings.BASE_URL}/uploads/")
    assert (answer["upload"]["method"], answer["upload"]["headers"]) == ("PUT", {"Content-Type": "image/png"})
    assert answer["upload"]["expiresAt"] > answer["createdAt"]

    assert (sent := upload(answer, PNG)).status_code == 204
    assert sent["X-RateLimit-Limit"]
    done = complete(client, answer, base)
    assert done.status_code == 200
    assert done.json() == {key: value for key, value in answer.items() if key != "upload"} | {"status": "READY"}
    assert client.get(f"{base}/attachments/{answer['id']}").json() == done.json()
    assert complete(client, answer, base).json() == done.json()
    content = client.get(f"{base}/attachments/{answer['id']}/content")
    assert b"".join(content.streaming_content) == PNG
    assert stored() == [PNG]


def test_the_digest_is_optional(session):
    answer = announce(session, b"abc").json()
    assert answer["sha256"] is None
    upload(answer, b"abc")
    assert complete(session, answer).json()["sha256"] == digest(b"abc")


INVALID = [
    ({"fileName": ""}, "fileName"),
    ({"fileName": "x" * 256}, "fileName"),
    ({"fileName": 5}, "fileName"),
    ({"fileName": None}, "fileName"),
    ({"contentType": ""}, "contentType"),
    ({"contentType": "text"}, "contentType"),
    ({"contentType": "image/svg+xml"}, "contentType"),
    ({"contentType": "application/zip"}, "contentType"),
    ({"contentType": "text/plain; charset=latin-1"}, "contentType"),
    ({"contentType": "text/plain\r\nX: y"}, "contentType"),
    ({"contentType": "text/" + "x" * 200}, "contentType"),
    ({"contentType": "text/*"}, "contentType"),
    ({"contentType": "text/ſı"}, "contentType"),
    ({"sizeBytes": 0}, "sizeBytes"),
    ({"sizeBytes": -1}, "sizeBytes"),
    ({"sizeBytes": "5"}, "sizeBytes"),
    ({"sizeBytes": 5.5}, "sizeBytes"),
    ({"sizeBytes": True}, "sizeBytes"),
    ({"sizeBytes": None}, "sizeBytes"),
    ({"sha256": "abc"}, "sha256"),
    ({"sha256": "g" * 64}, "sha256"),
    ({"sha256": 1}, "sha256"),
]


def test_an_invalid_field_is_400(session, subtests):
    for change, field in INVALID:
        with subtests.test(repr(change)[:100]):
            assert list(fields(announce(session, **change))) == [field]
            assert not Attachment.objects.exists()


def test_every_field_but_the_digest_is_required(session):
    problems = fields(session.post("/api/v1/attachments", {}, format="json"))
    assert set(problems) == {"fileName", "contentType", "sizeBytes"}


def test_nul_characters_and_lone_surrogates_are_400(session):
    for name in (b"a\\u0000b", b"\\ud800"):
        body = b'{"fileName": "' + name + b'", "contentType": "text/plain", "sizeBytes": 5}'
        answer = session.generic("POST", "/api/v1/attachments", body, content_type="application/json")
        assert code(answer) == (400, "VALIDATION_ERROR")


@pytest.mark.parametrize("size", [101, 2**62])
def test_a_file_that_is_too_large_is_413(session, settings, size):
    settings.ATTACHMENT_MAX_BYTES = 100
    assert code(announce(session, sizeBytes=size)) == (413, "PAYLOAD_TOO_LARGE")
    assert announce(session, sizeBytes=100).status_code == 201


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("text/csv", "text/csv"),
        ("Text/Markdown; charset=UTF-8", "text/markdown"),
        ('text/plain;charset="utf8"', "text/plain"),
        ("application/json", "application/json"),
        ("application/pdf", "application/pdf"),
        ("IMAGE/WEBP", "image/webp"),
    ],
)
def test_content_types(session, given, kept):
    assert announce(session, contentType=given).json()["contentType"] == kept


def test_the_accepted_content_types_are_a_setting(session, settings):
    settings.ATTACHMENT_TYPES = ["application/zip"]
    assert announce(session, contentType="application/zip").status_code == 201
    assert "application/zip" in fields(announce(session, contentType="text/plain"))["contentType"][0]


HOSTILE = [
    "../../etc/passwd", "/etc/passwd", "C:\\x.exe", "..", ".", " ", "a\nb", "a\r\nX: y", "a\tb", "\x1b[31m", "\x7f",
    "gnp\u202eexe.txt", "\u2066a\u2069", "\u200b", "漢" * 255, "🦊" * 255, 'a"b.txt', "a;b=c", "%2e%2e%2f", "a'b",
    "-rf", "CON", "x" * 255,
]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_a_file_name_is_never_used_as_a_path(session, storage, name):
    attachment = ready(session, b"Hello", fileName=name)
    assert attachment["fileName"] == name
    (file,) = [path.relative_to(storage) for path in storage.rglob("*") if path.is_file()]
    assert re.fullmatch(rf"attachments/{attachment['id']}/[0-9a-f]{{32}}", str(file))
    answer = session.get(f"/api/v1/attachments/{attachment['id']}/content")
    assert answer.status_code == 200
    header = answer["Content-Disposition"]
    assert re.fullmatch(r'attachment; filename(="[^"\\/%\x00-\x1f\x7f-\xff]+"|\*=utf-8\'\'[\w.~%-]+)', header)
    answer.close()


# --- access ----------------------------------------------------------------------------------------------------------


def test_the_same_idempotency_key_announces_once(session):
    body = {"fileName": "a", "contentType": "text/plain", "sizeBytes": 1}

    def post() -> Any:
        return session.post("/api/v1/attachments", body, format="json", headers={"Idempotency-Key": "k"})

    answers = [post(), post()]
    upload(answers[0].json(), b"a")
    assert complete(session, answers[0].json()).status_code == 200
    answers.append(post())
    assert answers[0].json() == answers[1].json() == answers[2].json()
    assert [answer.get("Idempotent-Replayed") for answer in answers] == [None, "true", "true"]
    assert Attachment.objects.count() == 1
    token = answers[0].json()["upload"]["url"].rpartition("/")[2]
    [kept] = IdempotencyRecord.objects.values_list("response_body", flat=True)
    assert token.encode() not in bytes(kept)


def test_the_replay_for_a_deleted_chat_is_404_as_documented(session, user):
    body = {"fileName": "a", "contentType": "text/plain", "sizeBytes": 1}
    made = session.post("/api/v1/attachments", body, format="json", headers={"Idempotency-Key": "k"}).json()
    upload(made, b"a")
    assert complete(session, made).status_code == 200
    chat = factories.ChatFactory(user=user)
    attachments.use([Attachment.objects.get(pk=made["id"])], factories.MessageFactory(chat=chat).pk)
    assert session.delete(f"/api/v1/chats/{chat.pk}").status_code == 204
    answer = session.post("/api/v1/attachments", body, format="json", headers={"Idempotency-Key": "k"})
    assert code(answer) == (404, "NOT_FOUND")
    documented = session.get("/api/schema?format=json").json()["paths"]["/api/v1/attachments"]["post"]
    assert "404" in documented["responses"]


# --- the limit of a user ---------------------------------------------------------------------------------------------
def test_all_attachments_of_a_user_share_a_limit(session, user, settings):
    settings.ATTACHMENT_USER_MAX_BYTES = 100
    factories.AttachmentFactory(user=factories.UserFactory(), size_bytes=1000)
    factories.AttachmentFactory(user=user, size_bytes=60)
    pending = announce(session, sizeBytes=30)
    assert pending.status_code == 201
    assert code(announce(session, sizeBytes=11)) == (409, "CONFLICT")
    assert announce(session, sizeBytes=10).status_code == 201
    assert code(announce(session, sizeBytes=1)) == (409, "CONFLICT")
    Attachment.objects.filter(pk=pending.json()["id"]).update(expires_at=clock.now())
    assert code(announce(session, sizeBytes=1)) == (409, "CONFLICT")
    attachments.expire_attachments()
    assert announce(session, sizeBytes=30).status_code == 201


def test_attachments_of_a_deleted_chat_count_until_they_are_purged(session, user, settings):
    settings.ATTACHMENT_USER_MAX_BYTES = 100
    message = factories.MessageFactory(chat__user=user)
    factories.AttachmentFactory(user=user, message=message, size_bytes=100)
    assert session.delete(f"/api/v1/chats/{message.chat_id}").status_code == 204
    assert chat_services.purge_chats() == 0
    assert code(announce(session, sizeBytes=1)) == (409, "CONFLICT")
    settings.CHAT_RETENTION_DAYS = 0
    assert chat_services.purge_chats() == 1
    assert announce(session, sizeBytes=100).status_code == 201


def test_a_purge_that_stops_midway_frees_nothing_that_is_stored(session, user, settings, monkeypatch):
    """The bytes are removed before the row, so the quota never counts less than the storage has."""
    settings.ATTACHMENT_USER_MAX_BYTES = 24
    settings.CHAT_RETENTION_DAYS = 0
    message = factories.MessageFactory(chat__user=user)
    kept = [announce(session, b"twelve bytes").json() for _ in range(2)]
    for attachment in kept:
        upload(attachment, b"twelve bytes")
        complete(session, attachment)
    Attachment.objects.all().update(message=message)
    session.delete(f"/api/v1/chats/{message.chat_id}")

    def crash(*args: Any) -> int:
        raise SystemExit

    monkeypatch.setattr(attachments.batches, "delete_rows", crash)  # after the bytes, before the rows
    with pytest.raises(SystemExit):
        chat_services.purge_chats()
    assert stored() == []
    assert code(announce(session, sizeBytes=1)) == (409, "CONFLICT")
    monkeypatch.undo()
    monkeypatch.setattr(attachments.files, "remove_all", crash)  # before the bytes
    with pytest.raises(SystemExit):
        chat_services.purge_chats()
    assert code(announce(session, sizeBytes=1)) == (409, "CONFLICT")
    monkeypatch.undo()
    assert chat_services.purge_chats() == 1
    assert announce(session, sizeBytes=24).status_code == 201


def test_an_unused_attachment_counts_until_its_file_is_removed(session, user, settings, monkeypatch):
    settings.ATTACHMENT_USER_MAX_BYTES = 100
    factories.AttachmentFactory(user=user, size_bytes=100, status="EXPIRED", expires_at=clock.now())
    assert code(announce(session, sizeBytes=1)) == (409, "CONFLICT")  # expired, but still stored
    attachments.expire_attachments()
    assert announce(session, sizeBytes=100).status_code == 201


def test_without_a_limit_nothing_is_counted(session, user, settings):
    settings.ATTACHMENT_USER_MAX_BYTES = 0
    factories.AttachmentFactory(user=user, size_bytes=1024**5)
    assert announce(session).status_code == 201


@pytest.mark.django_db(transaction=True)
def test_concurrent_announcements_do_not_exceed_the_limit(settings):
    settings.ATTACHMENT_USER_MAX_BYTES = 100
    user = factories.UserFactory()
    answers = side_by_side(8, lambda _: announce(factories.session_client(user), sizeBytes=30))
    assert sorted(answer.status_code for answer in answers) == [201] * 3 + [409] * 5


def test_query_counts(session, django_assert_num_queries):
    session.get("/api/v1/me")
    with django_assert_num_queries(6):  # a transaction: begin, lock the user, sum, write, commit
        answer = announce(session).json()
    with django_assert_num_queries(5):  # the row and its user; savepointless transaction: begin, lock, write, commit
        upload(answer, b"Hello")
    with django_assert_num_queries(6):
        complete(session, answer)
    with django_assert_num_queries(2):
        session.get(f"/api/v1/attachments/{answer['id']}")
    with django_assert_num_queries(2):
        session.get(f"/api/v1/attachments/{answer['id']}/content").close()
