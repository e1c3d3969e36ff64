"""Attachments announced, uploaded and completed, on both surfaces (interface, section 3)."""

from __future__ import annotations

import io
import re
from datetime import timedelta
from typing import Any

import pytest
from django.core.files.storage import default_storage
from django.core.signing import Signer
from django.test import Client

from chats import attachments, files, transitions
from chats.models import Attachment
from config.api import clock
from config.api.errors import Conflict
from tests import factories
from tests.api.threads import side_by_side
from tests.chats.conftest import PNG, announce, code, complete, digest, fields, ready, stored, upload

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


def test_the_digest_need_not_be_announced(session):
    answer = announce(session, b"abc").json()
    assert answer["sha256"] is None
    upload(answer, b"abc")
    assert complete(session, answer).json()["sha256"] == digest(b"abc")


@pytest.mark.parametrize(
    ("change", "field"),
    [
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
        ({"sizeBytes": 0}, "sizeBytes"),
        ({"sizeBytes": -1}, "sizeBytes"),
        ({"sizeBytes": "5"}, "sizeBytes"),
        ({"sizeBytes": 5.5}, "sizeBytes"),
        ({"sizeBytes": True}, "sizeBytes"),
        ({"sizeBytes": None}, "sizeBytes"),
        ({"sha256": "abc"}, "sha256"),
        ({"sha256": "g" * 64}, "sha256"),
        ({"sha256": 1}, "sha256"),
    ],
)
def test_what_does_not_fit_is_400(session, change, field):
    assert list(fields(announce(session, **change))) == [field]
    assert not Attachment.objects.exists()


def test_every_field_but_the_digest_is_required(session):
    problems = fields(session.post("/api/v1/attachments", {}, format="json"))
    assert set(problems) == {"fileName", "contentType", "sizeBytes"}


def test_nul_and_half_characters_are_400(session):
    for name in (b"a\\u0000b", b"\\ud800"):
        body = b'{"fileName": "' + name + b'", "contentType": "text/plain", "sizeBytes": 5}'
        answer = session.generic("POST", "/api/v1/attachments", body, content_type="application/json")
        assert code(answer) == (400, "VALIDATION_ERROR")


@pytest.mark.parametrize("size", [101, 2**62])
def test_too_large_a_file_is_413(session, settings, size):
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
def test_types(session, given, kept):
    assert announce(session, contentType=given).json()["contentType"] == kept


def test_the_types_are_a_setting(session, settings):
    settings.ATTACHMENT_TYPES = ["application/zip"]
    assert announce(session, contentType="application/zip").status_code == 201
    assert "application/zip" in fields(announce(session, contentType="text/plain"))["contentType"][0]


HOSTILE = [
    "../../etc/passwd", "/etc/passwd", "C:\\x.exe", "..", ".", " ", "a\nb", "a\r\nX: y", "a\tb", "\x1b[31m", "\x7f",
    "gnp\u202eexe.txt", "\u2066a\u2069", "\u200b", "漢" * 255, "🦊" * 255, 'a"b.txt', "a;b=c", "%2e%2e%2f", "a'b",
    "-rf", "CON", "x" * 255,
]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_any_text_is_a_name_to_show_and_never_a_path(session, storage, name):
    attachment = ready(session, b"Hello", fileName=name)
    assert attachment["fileName"] == name
    (file,) = [path.relative_to(storage) for path in storage.rglob("*") if path.is_file()]
    assert re.fullmatch(rf"attachments/{attachment['id']}/[0-9a-f]{{32}}", str(file))
    answer = session.get(f"/api/v1/attachments/{attachment['id']}/content")
    assert answer.status_code == 200
    header = answer["Content-Disposition"]
    assert re.fullmatch(r'attachment; filename="[^"\\/%\x00-\x1f\x7f-\xff]+"(; filename\*=UTF-8\'\'[\w.~%-]+)?', header)
    answer.close()


# --- uploading -------------------------------------------------------------------------------------------------------
def test_an_upload_can_be_repeated_until_it_is_complete(session):
    answer = announce(session, b"one").json()
    for content in (b"one", b"two", b"six"):
        assert upload(answer, content).status_code == 204
    assert stored() == [b"six"]
    assert complete(session, answer).json()["sha256"] == digest(b"six")
    assert code(upload(answer, b"new")) == (409, "CONFLICT")
    assert stored() == [b"six"]


@pytest.mark.parametrize("content", [b"", b"1234", b"123456", b"x" * 200_000])
def test_another_size_is_400_and_leaves_nothing(session, content):
    answer = announce(session, b"12345").json()
    assert list(fields(upload(answer, content))) == ["sizeBytes"]
    assert stored() == []
    assert upload(answer, b"12345").status_code == 204


def test_a_failed_upload_does_not_harm_the_one_before(session):
    answer = announce(session, b"12345").json()
    upload(answer, b"12345")
    fields(upload(answer, b"123"))
    assert stored() == [b"12345"]
    assert complete(session, answer).status_code == 200


def test_a_body_over_the_limit_is_413(session, settings):
    settings.ATTACHMENT_MAX_BYTES = 100
    answer = announce(session, b"x" * 100).json()
    assert code(upload(answer, b"x" * 101)) == (413, "PAYLOAD_TOO_LARGE")
    assert stored() == []


class Endless(io.RawIOBase):
    """A body that never ends, and counts what was read of it."""

    taken = 0

    def read(self, size: int = -1) -> bytes:
        assert 0 < size <= files.READ_SIZE, "the whole body was asked for at once"
        self.taken += size
        return b"x" * size


def put_raw(answer: dict[str, Any], body: Any, **environ: Any) -> Any:
    path = "/uploads/" + answer["upload"]["url"].rpartition("/")[2]
    request = {"REQUEST_METHOD": "PUT", "PATH_INFO": path, "wsgi.input": body, "CONTENT_TYPE": "x/y", **environ}
    return Client().request(**request)


CHUNKED = {"HTTP_TRANSFER_ENCODING": "chunked", "CONTENT_LENGTH": "", "wsgi.input_terminated": True}


def test_a_chunked_body(session):
    content = PNG * 300
    answer = announce(session, content, contentType="image/png").json()
    assert put_raw(answer, io.BytesIO(content), **CHUNKED).status_code == 204
    assert complete(session, answer).status_code == 200


@pytest.mark.parametrize("limit", [200_000, 10_000_000])
def test_a_chunked_body_without_an_end_is_read_no_further_than_its_size(session, settings, limit):
    settings.ATTACHMENT_MAX_BYTES = limit
    answer, body = announce(session, sizeBytes=200_000).json(), Endless()
    assert put_raw(answer, body, **CHUNKED).status_code == (413 if limit == 200_000 else 400)
    assert body.taken == 200_001
    assert stored() == []


def test_a_chunked_body_that_is_too_short(session):
    answer = announce(session, b"12345").json()
    assert put_raw(answer, io.BytesIO(b"1234"), **CHUNKED).status_code == 400
    assert stored() == []


def test_a_body_that_breaks_off(session):
    class Broken(io.RawIOBase):
        reads = 0

        def read(self, size: int = -1) -> bytes:
            self.reads += 1
            if self.reads > 1:
                raise OSError("the client is gone")
            return b"x" * min(size, 10)

    answer = announce(session, sizeBytes=100).json()
    assert code(put_raw(answer, Broken(), CONTENT_LENGTH="100")) == (400, "VALIDATION_ERROR")
    assert stored() == []
    assert Attachment.objects.get().stored_name == ""


def test_a_content_length_that_lies(session):
    answer = announce(session, b"12345").json()
    assert put_raw(answer, io.BytesIO(b"123"), CONTENT_LENGTH="5").status_code == 400
    assert put_raw(answer, io.BytesIO(b"12345678"), CONTENT_LENGTH="5").status_code == 204
    assert stored() == [b"12345"]
    assert code(put_raw(answer, io.BytesIO(b"12345"), CONTENT_LENGTH="x")) == (400, "VALIDATION_ERROR")


@pytest.mark.parametrize("spoil", [lambda t: t[:-1], lambda t: t + "x", lambda t: "x" + t, lambda t: "%00",
                                   lambda t: "%ff:%ff", lambda t: "x" * 10_000])  # fmt: skip
def test_an_address_that_was_tampered_with_is_404(session, spoil):
    answer = announce(session, b"12345").json()
    head, _, token = answer["upload"]["url"].rpartition("/")
    assert code(upload({"upload": {"url": f"{head}/{spoil(token)}"}}, b"12345")) == (404, "NOT_FOUND")
    assert stored() == []


def test_an_address_is_signed_for_one_attachment(session):
    mine, other = announce(session).json(), announce(session).json()
    head, _, token = mine["upload"]["url"].rpartition("/")
    forged = f"{head}/{token.replace(mine['id'], other['id'])}"
    assert code(upload({"upload": {"url": forged}}, b"Hello")) == (404, "NOT_FOUND")
    elsewhere = Signer(salt="another purpose").sign(f"session.{mine['id']}")
    assert code(upload({"upload": {"url": f"{head}/{elsewhere}"}}, b"Hello")) == (404, "NOT_FOUND")


def test_an_address_past_its_time_is_404(session):
    answer = announce(session).json()
    Attachment.objects.update(expires_at=clock.now())
    assert code(upload(answer, b"Hello")) == (404, "NOT_FOUND")
    assert stored() == []


def test_an_address_of_somebody_inactive_is_404(session, user):
    answer = announce(session).json()
    user.is_active = False
    user.save()
    assert code(upload(answer, b"Hello")) == (404, "NOT_FOUND")


@pytest.mark.parametrize("method", ["get", "post", "patch", "delete", "options"])
def test_an_address_takes_puts_only(session, method):
    answer = announce(session).json()
    path = "/uploads/" + answer["upload"]["url"].rpartition("/")[2]
    response = getattr(Client(), method)(path)
    assert code(response) == (405, "METHOD_NOT_ALLOWED")
    assert response["Allow"] == "PUT"


def test_completed_while_it_was_uploaded_anew(session):
    """The upload that loses leaves the completed file as it is."""
    answer = announce(session, b"first").json()
    upload(answer, b"first")

    def parts():
        yield b"sec"
        assert complete(session, answer).status_code == 200
        yield b"nd"

    row = Attachment.objects.get()
    with pytest.raises(Conflict):
        attachments.receive(row, parts())
    assert stored() == [b"first"]
    assert complete(session, answer).json()["sha256"] == digest(b"first")


def test_completed_after_another_upload_was_stored_but_before_it_counts(session, monkeypatch):
    answer = announce(session, b"first").json()
    upload(answer, b"first")
    write = files.write

    def and_complete(*args):
        name = write(*args)
        assert complete(session, answer).status_code == 200
        return name

    monkeypatch.setattr(files, "write", and_complete)
    assert code(upload(answer, b"later")) == (409, "CONFLICT")
    assert stored() == [b"first"]
    content = session.get(f"/api/v1/attachments/{answer['id']}/content")
    assert b"".join(content.streaming_content) == b"first"


def test_a_storage_that_fails_is_503_and_the_upload_can_be_repeated(session, monkeypatch):
    answer = announce(session).json()

    def fail(*args):
        raise OSError("disk full")

    with monkeypatch.context() as broken:
        broken.setattr(default_storage, "save", fail)
        assert code(upload(answer, b"Hello")) == (503, "UNAVAILABLE")
    assert upload(answer, b"Hello").status_code == 204
    with monkeypatch.context() as broken:
        broken.setattr(default_storage, "open", fail)
        assert code(complete(session, answer)) == (503, "UNAVAILABLE")
    assert complete(session, answer).status_code == 200


# --- completing ------------------------------------------------------------------------------------------------------
def test_not_uploaded_yet_is_409(api):
    client, base = api
    answer = announce(client, base=base).json()
    assert code(complete(client, answer, base)) == (409, "CONFLICT")
    assert client.get(f"{base}/attachments/{answer['id']}").json()["status"] == "PENDING"


def test_a_lost_file_is_409(session):
    answer = announce(session).json()
    upload(answer, b"Hello")
    default_storage.delete(Attachment.objects.get().stored_name)
    assert code(complete(session, answer)) == (409, "CONFLICT")
    upload(answer, b"Hello")
    assert complete(session, answer).status_code == 200


def test_another_digest_is_400(session):
    answer = announce(session, b"Hello", sha256=digest(b"Hallo")).json()
    upload(answer, b"Hello")
    assert fields(complete(session, answer)) == {"sha256": [f"The file's SHA-256 is {digest(b'Hello')}."]}
    upload(answer, b"Hallo")
    assert complete(session, answer).json()["status"] == "READY"


def test_a_file_that_changed_its_size_is_400(session):
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
def test_genuine_files(session, kind):
    assert ready(session, GENUINE[kind], contentType=kind)["contentType"] == kind


@pytest.mark.parametrize(
    ("kind", "content"),
    [
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
    ],
)
def test_a_file_that_is_not_what_it_says_is_400(session, kind, content):
    answer = announce(session, content, contentType=kind).json()
    upload(answer, content)
    assert list(fields(complete(session, answer))) == ["contentType"]
    assert session.get(f"/api/v1/attachments/{answer['id']}").json()["status"] == "PENDING"


def test_a_pdf_may_begin_a_little_later(session):
    ready(session, b"\n" * 1000 + b"%PDF-1.4", contentType="application/pdf")


def test_a_character_may_lie_across_two_parts(session):
    ready(session, b"x" * (files.READ_SIZE - 1) + "🦊".encode())


def test_completing_past_its_time_is_409(session):
    answer = announce(session).json()
    upload(answer, b"Hello")
    Attachment.objects.update(expires_at=clock.now())
    for _ in range(2):
        assert code(complete(session, answer)) == (409, "CONFLICT")
    assert session.get(f"/api/v1/attachments/{answer['id']}").json()["status"] == "EXPIRED"


def test_an_upload_that_comes_while_it_is_checked_is_noticed(session, monkeypatch):
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


def test_what_broken_uploads_left_goes_when_it_is_complete(session, storage):
    answer = announce(session).json()
    upload(answer, b"Hello")
    (storage / "attachments" / answer["id"] / "left-by-a-crash").write_bytes(b"Hel")
    complete(session, answer)
    assert stored() == [b"Hello"]


# --- whose -----------------------------------------------------------------------------------------------------------
def test_anothers_attachment_is_as_if_it_did_not_exist(session):
    row = factories.AttachmentFactory()
    path = f"/api/v1/attachments/{row.pk}"
    for answer in (session.get(path), session.get(f"{path}/content"), session.post(f"{path}/complete")):
        assert code(answer) == (404, "NOT_FOUND")


def test_scopes(user):
    row = factories.AttachmentFactory(user=user)
    base = "/api/public/v1"
    reader, writer = (factories.public_client(user, [scope]) for scope in ("chats:read", "attachments:write"))
    for path in (f"{base}/attachments/{row.pk}", f"{base}/attachments/{row.pk}/content"):
        assert reader.get(path).status_code == 200
        assert writer.get(path).json()["error"]["details"] == {"requiredScope": "chats:read"}
    assert announce(writer, base=base).status_code == 201
    assert code(announce(reader, base=base)) == (403, "FORBIDDEN")
    assert complete(writer, {"id": row.pk}, base).status_code == 200
    assert code(complete(reader, {"id": row.pk}, base)) == (403, "FORBIDDEN")


def test_the_same_key_announces_once(session):
    body = {"fileName": "a", "contentType": "text/plain", "sizeBytes": 1}
    answers = [session.post("/api/v1/attachments", body, format="json", headers={"Idempotency-Key": "k"}) for _ in "ab"]
    assert answers[0].json() == answers[1].json()
    assert answers[1]["Idempotent-Replayed"] == "true"
    assert Attachment.objects.count() == 1


# --- all of a user's -------------------------------------------------------------------------------------------------
def test_all_of_a_users_have_a_limit_together(session, user, settings):
    settings.ATTACHMENT_USER_MAX_BYTES = 100
    factories.AttachmentFactory(user=factories.UserFactory(), size_bytes=1000)
    factories.AttachmentFactory(user=user, size_bytes=60)
    pending = announce(session, sizeBytes=30)
    assert pending.status_code == 201
    assert code(announce(session, sizeBytes=11)) == (409, "CONFLICT")
    assert announce(session, sizeBytes=10).status_code == 201
    assert code(announce(session, sizeBytes=1)) == (409, "CONFLICT")
    Attachment.objects.filter(pk=pending.json()["id"]).update(status="EXPIRED")
    assert announce(session, sizeBytes=30).status_code == 201


def test_a_deleted_chat_makes_room(session, user, settings):
    settings.ATTACHMENT_USER_MAX_BYTES = 100
    message = factories.MessageFactory(chat__user=user)
    factories.AttachmentFactory(user=user, message=message, size_bytes=100)
    assert code(announce(session, sizeBytes=1)) == (409, "CONFLICT")
    assert session.delete(f"/api/v1/chats/{message.chat_id}").status_code == 204
    assert announce(session, sizeBytes=100).status_code == 201


def test_without_a_limit_nothing_is_counted(session, user, settings):
    settings.ATTACHMENT_USER_MAX_BYTES = 0
    factories.AttachmentFactory(user=user, size_bytes=1024**5)
    assert announce(session).status_code == 201


@pytest.mark.django_db(transaction=True)
def test_of_many_at_once_only_those_that_fit_are_taken(settings):
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


# --- expiring --------------------------------------------------------------------------------------------------------
def past() -> None:
    Attachment.objects.filter(status="PENDING").update(expires_at=clock.now() - timedelta(seconds=1))


def test_what_is_not_completed_in_time_expires_with_its_files(session, monkeypatch):
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


def test_files_that_could_not_be_removed_are_tried_again(session, storage, monkeypatch):
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
    for row in Attachment.objects.all():
        assert row.status == "EXPIRED"
        assert not transitions.complete(row, uploaded=row.stored_name, stored="x", sha256="0" * 64)
    assert {code(upload(answer, b"Hello")) for answer in answers} == {(404, "NOT_FOUND")}
    Attachment.objects.update(expires_at=clock.now())
    assert attachments.expire_attachments() == 2
    assert stored() == []


def test_one_that_was_completed_at_the_last_moment_keeps_its_file(session, monkeypatch):
    late, just = announce(session).json(), announce(session).json()
    for answer in (late, just):
        upload(answer, b"Hello")
    past()
    expire = transitions.expire

    def after_it_was_completed(ids):
        Attachment.objects.filter(pk=just["id"]).update(status="READY", sha256="0" * 64, expires_at=None)
        return expire(ids)

    monkeypatch.setattr(transitions, "expire", after_it_was_completed)
    assert attachments.expire_attachments() == 1
    assert session.get(f"/api/v1/attachments/{just['id']}/content").status_code == 200


def test_one_that_died_after_expiring_left_the_files_to_the_next(session):
    upload(announce(session).json(), b"Hello")
    past()
    assert transitions.expire([Attachment.objects.get().pk]) == 1
    assert attachments.expire_attachments() == 1
    assert stored() == []


def test_the_expiry_is_a_setting(session, settings):
    settings.ATTACHMENT_EXPIRY_SECONDS = 3600
    announce(session)
    row = Attachment.objects.get()
    assert row.expires_at - row.created_at == timedelta(hours=1)
