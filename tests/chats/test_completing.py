"""Completing attachments: checks of the uploaded file, and expiry (docs/attachments.md)."""

from datetime import timedelta

import pytest
from django.core.files.storage import default_storage

from chats import attachments, files
from chats.models import Attachment
from config.kernel import clock
from tests import factories
from tests.chats.conftest import PNG, announce, code, complete, digest, fields, ready, stored, upload

pytestmark = pytest.mark.django_db


@pytest.fixture(params=["/api/v1", "/api/public/v1"])
def api(request, user):
    client = factories.session_client(user) if request.param == "/api/v1" else factories.public_client(user)
    return client, request.param


def test_completing_without_an_upload_is_409(api):
    client, base = api
    answer = announce(client, base=base).json()
    assert code(complete(client, answer, base)) == (409, "CONFLICT")
    assert client.get(f"{base}/attachments/{answer['id']}").json()["status"] == "PENDING"


def test_completing_a_lost_file_is_409(session):
    answer = announce(session).json()
    upload(answer, b"Hello")
    default_storage.delete(Attachment.objects.get().stored_name)
    assert code(complete(session, answer)) == (409, "CONFLICT")
    upload(answer, b"Hello")
    assert complete(session, answer).status_code == 200


def test_a_wrong_digest_is_400(session):
    answer = announce(session, b"Hello", sha256=digest(b"Hallo")).json()
    upload(answer, b"Hello")
    assert fields(complete(session, answer)) == {"sha256": [f"The file's SHA-256 is {digest(b'Hello')}."]}
    upload(answer, b"Hallo")
    assert complete(session, answer).json()["status"] == "READY"


def test_a_stored_file_with_another_size_is_400(session):
    answer = announce(session).json()
    upload(answer, b"Hello")
    with default_storage.open(Attachment.objects.get().stored_name, "ab") as file:
        file.write(b"!")
    assert list(fields(complete(session, answer))) == ["sizeBytes"]


GENUINE = {
    "image/png": PNG,
    "image/jpeg": b"\xff\xd8\xff\xe0" + b"x" * 50,
    "image/gif": b"GIF89a" + b"x" * 50,
    "image/webp": b"RIFF\x10\x00\x00\x00WEBPVP8 ",
    "application/pdf": b"%PDF-1.7\n",
    "text/plain": "Grüße 🦊\n".encode(),
    "application/json": b'{"a": 1}',
}


@pytest.mark.parametrize("kind", GENUINE)
def test_files_that_match_their_content_type(session, kind):
    assert ready(session, GENUINE[kind], contentType=kind)["contentType"] == kind


OTHERS = [
    ("image/png", b"<script>alert(1)</script>"),
    ("image/png", GENUINE["image/jpeg"]),
    ("image/png", PNG[:7]),
    ("image/jpeg", PNG),
    ("image/gif", b"GIF88a..."),
    ("image/webp", b"RIFF\x10\x00\x00\x00WAVE"),
    ("application/pdf", b"MZ\x90\x00"),
    ("application/pdf", b"x" * 1024 + b"%PDF-1.7"),
    ("text/plain", b"a\x00b"),
    ("text/plain", b"\xff\xfeH\x00"),
    ("text/csv", b"caf\xe9"),
    ("text/markdown", "🦊".encode()[:-1]),
    ("application/json", b"\xed\xa0\x80"),
    ("text/plain", b"x" * 70_000 + b"\xff"),
    ("text/plain", b"x" * 70_000 + b"\x00"),
]


def test_a_file_that_does_not_match_its_content_type_is_400(session, subtests):
    for kind, content in OTHERS:
        with subtests.test(f"{kind}: {content[:20]!r}"):
            answer = announce(session, content, contentType=kind).json()
            upload(answer, content)
            assert list(fields(complete(session, answer))) == ["contentType"]
            assert session.get(f"/api/v1/attachments/{answer['id']}").json()["status"] == "PENDING"


def test_a_pdf_header_may_follow_other_bytes(session):
    ready(session, b"\n" * 1000 + b"%PDF-1.4", contentType="application/pdf")


def test_a_character_may_be_split_between_two_parts(session):
    ready(session, b"x" * (files.READ_SIZE - 1) + "🦊".encode())


def test_completing_after_the_expiry_is_409(session):
    answer = announce(session).json()
    upload(answer, b"Hello")
    Attachment.objects.update(expires_at=clock.now())
    for _ in range(2):
        assert code(complete(session, answer)) == (409, "CONFLICT")
    assert session.get(f"/api/v1/attachments/{answer['id']}").json()["status"] == "EXPIRED"


def test_an_upload_during_the_check_is_detected(session, monkeypatch):
    answer = announce(session).json()
    upload(answer, b"Hello")
    check = attachments._check

    def and_upload(*args):
        result = check(*args)
        upload(answer, b"Later")
        return result

    with monkeypatch.context() as slow:
        slow.setattr(attachments, "_check", and_upload)
        assert code(complete(session, answer)) == (409, "CONFLICT")
    assert complete(session, answer).json()["sha256"] == digest(b"Later")
    assert stored() == [b"Later"]


def test_completing_removes_files_of_failed_uploads(session, storage):
    answer = announce(session).json()
    upload(answer, b"Hello")
    (storage / "attachments" / answer["id"] / "left-by-a-crash").write_bytes(b"Hel")
    complete(session, answer)
    assert stored() == [b"Hello"]


# --- expiring --------------------------------------------------------------------------------------------------------
def past() -> None:
    Attachment.objects.filter(status="PENDING").update(expires_at=clock.now() - timedelta(seconds=1))


def test_an_attachment_not_completed_in_time_expires_with_its_files(session, monkeypatch):
    monkeypatch.setattr(attachments, "SWEEP_BATCH", 2)
    late = [announce(session).json() for _ in range(5)]
    for answer in late[:3]:
        upload(answer, b"Hello")
    kept = ready(session, b"ready")
    past()
    waiting = announce(session).json()
    upload(waiting, b"still")
    assert attachments.expire_attachments() == 5
    assert attachments.expire_attachments() == 0
    for answer in late:
        assert session.get(f"/api/v1/attachments/{answer['id']}").json()["status"] == "EXPIRED"
        assert session.get(f"/api/v1/attachments/{answer['id']}/content").status_code == 404
        assert code(upload(answer, b"Hello")) == (404, "NOT_FOUND")
        assert code(complete(session, answer)) == (409, "CONFLICT")
    assert stored() == [b"ready", b"still"]
    assert session.get(f"/api/v1/attachments/{kept['id']}").json()["status"] == "READY"
    assert complete(session, waiting).status_code == 200


def test_removing_files_is_retried_after_a_failure(session, storage, monkeypatch):
    answers = [announce(session).json() for _ in range(2)]
    for answer in answers:
        upload(answer, b"Hello")
    past()

    def fail(name):
        raise OSError("away")

    with monkeypatch.context() as broken:
        broken.setattr(default_storage, "delete", fail)
        assert attachments.expire_attachments() == 0
    assert len(stored()) == 2
    assert {row.status for row in Attachment.objects.all()} == {"EXPIRED"}
    assert {code(complete(session, answer)) for answer in answers} == {(409, "CONFLICT")}
    assert {code(upload(answer, b"Hello")) for answer in answers} == {(404, "NOT_FOUND")}
    Attachment.objects.update(expires_at=clock.now())
    assert attachments.expire_attachments() == 2
    assert stored() == []


def test_an_attachment_completed_during_the_expiry_keeps_its_file(session, monkeypatch):
    late, just = announce(session).json(), announce(session).json()
    for answer in (late, just):
        upload(answer, b"Hello")
    past()
    expire = attachments._expire_due

    def after_it_was_completed(ids):
        factories.force_update(
            Attachment.objects.filter(pk=just["id"]), status="READY", sha256="0" * 64, expires_at=None
        )
        return expire(ids)

    monkeypatch.setattr(attachments, "_expire_due", after_it_was_completed)
    assert attachments.expire_attachments() == 1
    assert session.get(f"/api/v1/attachments/{just['id']}/content").status_code == 200


def test_the_next_expiry_removes_files_that_a_crashed_one_left(session):
    upload(announce(session).json(), b"Hello")
    past()
    attachments._expire_due([Attachment.objects.get().pk])
    assert attachments.expire_attachments() == 1
    assert stored() == []


def test_the_expiry_is_a_setting(session, monkeypatch):
    monkeypatch.setattr("chats.attachments.ATTACHMENT_EXPIRY_SECONDS", 3600)
    announce(session)
    row = Attachment.objects.get()
    assert row.expires_at - row.created_at == timedelta(hours=1)
