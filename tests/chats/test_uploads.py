"""Uploading the content of attachments to the service (docs/attachments.md)."""

from types import SimpleNamespace

import pytest
from django.core.files.storage import default_storage
from django.core.signing import Signer
from django.test import Client

from chats import attachments, files
from chats.models import Attachment
from config.kernel import clock
from config.kernel.errors import Conflict
from tests.chats.conftest import announce, code, complete, digest, fields, stored, upload

pytestmark = pytest.mark.django_db


def test_an_upload_can_be_repeated_until_it_is_complete(session):
    answer = announce(session, b"one").json()
    for content in (b"one", b"two", b"six"):
        assert upload(answer, content).status_code == 204
    assert stored() == [b"six"]
    assert complete(session, answer).json()["sha256"] == digest(b"six")
    assert code(upload(answer, b"new")) == (409, "CONFLICT")
    assert stored() == [b"six"]


@pytest.mark.parametrize("content", [b"", b"1234", b"123456", b"x" * 200_000])
def test_a_wrong_size_is_400_and_stores_nothing(session, content):
    answer = announce(session, b"12345").json()
    assert list(fields(upload(answer, content))) == ["sizeBytes"]
    assert stored() == []
    assert upload(answer, b"12345").status_code == 204


def test_a_failed_upload_keeps_the_previous_one(session):
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


@pytest.mark.parametrize("spoil", [lambda t: t[:-1], lambda t: t + "x", lambda t: "x" + t, lambda t: "%00",
                                   lambda t: "%ff:%ff", lambda t: "x" * 10_000])  # fmt: skip
def test_a_modified_upload_address_is_404(session, spoil):
    answer = announce(session, b"12345").json()
    head, _, token = answer["upload"]["url"].rpartition("/")
    assert code(upload({"upload": {"url": f"{head}/{spoil(token)}"}}, b"12345")) == (404, "NOT_FOUND")
    assert stored() == []


def test_an_upload_address_is_valid_for_one_attachment(session):
    mine, other = announce(session).json(), announce(session).json()
    head, _, token = mine["upload"]["url"].rpartition("/")
    forged = f"{head}/{token.replace(mine['id'], other['id'])}"
    assert code(upload({"upload": {"url": forged}}, b"Hello")) == (404, "NOT_FOUND")
    elsewhere = Signer(salt="another purpose").sign(f"session.{mine['id']}")
    assert code(upload({"upload": {"url": f"{head}/{elsewhere}"}}, b"Hello")) == (404, "NOT_FOUND")


def test_an_expired_upload_address_is_404(session):
    answer = announce(session).json()
    Attachment.objects.update(expires_at=clock.now())
    assert code(upload(answer, b"Hello")) == (404, "NOT_FOUND")
    assert stored() == []


def test_an_upload_address_of_an_inactive_user_is_404(session, user):
    answer = announce(session).json()
    user.is_active = False
    user.save()
    assert code(upload(answer, b"Hello")) == (404, "NOT_FOUND")


@pytest.mark.parametrize("method", ["get", "post", "patch", "delete", "options"])
def test_an_upload_address_accepts_put_only(session, method):
    answer = announce(session).json()
    path = "/uploads/" + answer["upload"]["url"].rpartition("/")[2]
    response = getattr(Client(), method)(path)
    assert code(response) == (405, "METHOD_NOT_ALLOWED")
    assert response["Allow"] == "PUT"


def test_an_upload_that_ends_after_the_completion_is_discarded(session):
    """The completed file stays unchanged."""
    answer = announce(session, b"first").json()
    upload(answer, b"first")

    def parts():
        yield b"sec"
        assert complete(session, answer).status_code == 200
        yield b"nd"

    row, sent = Attachment.objects.get(), parts()
    with pytest.raises(Conflict):
        attachments.receive(row, SimpleNamespace(read=lambda size: next(sent, b"")))
    assert stored() == [b"first"]
    assert complete(session, answer).json()["sha256"] == digest(b"first")


def test_an_upload_stored_but_not_recorded_before_the_completion_is_409(session, monkeypatch):
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


def test_a_storage_failure_is_503_and_the_upload_can_be_repeated(session, monkeypatch, caplog):
    answer = announce(session).json()

    def fail(*args):
        raise OSError("disk full")

    with monkeypatch.context() as broken:
        broken.setattr(default_storage, "save", fail)
        assert code(upload(answer, b"Hello")) == (503, "UNAVAILABLE")
    assert "an upload failed" in caplog.text
    assert upload(answer, b"Hello").status_code == 204
    with monkeypatch.context() as broken:
        broken.setattr(default_storage, "open", fail)
        assert code(complete(session, answer)) == (503, "UNAVAILABLE")
    assert complete(session, answer).status_code == 200
