"""Attachments in an S3-compatible object storage. Clients upload to it directly; the rest is unchanged."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import requests
from botocore.exceptions import EndpointConnectionError
from django.conf import settings
from django.core.files.storage import default_storage
from django.core.files.storage.handler import StorageHandler
from django.test import Client, override_settings

from chats import attachments
from chats import services as chat_services
from chats.models import Attachment, Chat
from config.kernel import clock
from runs.fronts.ai_sdk.views import attached
from runs.tools import files as tool_files
from tests import factories
from tests.chats.conftest import PNG, announce, code, complete, digest, fields
from tests.chats.object_storage import BUCKET, object_storage

pytestmark = pytest.mark.django_db


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A server that the settings name. Changed for each test, they would let each make a session of the SDK."""
    with object_storage() as url:
        changed = {
            "STORAGE_S3_BUCKET": BUCKET,
            "STORAGE_S3_ENDPOINT": url,
            "STORAGE_S3_ACCESS_KEY": "test",
            "STORAGE_S3_SECRET_KEY": "test",
            "STORAGES": settings.STORAGES | {"default": {"BACKEND": "config.storage.ObjectStorage"}},
        }
        with override_settings(**changed):
            yield url


@pytest.fixture(autouse=True)
def bucket(server: str) -> Any:
    """An empty bucket."""
    requests.post(f"{server}/moto-api/reset", timeout=10)
    made = default_storage.connection.create_bucket(Bucket=BUCKET)
    return made


def contents(bucket: Any) -> list[bytes]:
    return sorted(each.get()["Body"].read() for each in bucket.objects.all())


def put(answer: dict[str, Any], content: bytes) -> requests.Response:
    """Upload with the address and the headers of the answer, without a token."""
    upload = answer["upload"]
    return requests.request(upload["method"], upload["url"], data=content, headers=upload["headers"], timeout=10)


def ready(client: Any, content: bytes, **changes: Any) -> dict[str, Any]:
    answer = announce(client, content, **changes).json()
    assert put(answer, content).status_code == 200
    done = complete(client, answer)
    assert done.status_code == 200, done.content
    return done.json()


def test_the_settings_choose_the_storage():
    assert type(StorageHandler()["default"]).__name__ == "ObjectStorage"
    assert attachments.files.takes_uploads()


def test_a_file_becomes_an_attachment(session, bucket, server):
    answer = announce(session, PNG, contentType="image/png", fileName="ü.png", sha256=digest(PNG)).json()
    assert answer["upload"]["url"].startswith(f"{server}/{BUCKET}/attachments/{answer['id']}/upload?")
    assert put(answer, PNG).status_code == 200
    assert complete(session, answer).json()["status"] == "READY"
    assert contents(bucket) == [PNG]
    (kept,) = bucket.objects.all()
    assert kept.Object().content_type == "image/png"
    path = f"/api/v1/attachments/{answer['id']}/content"
    whole = session.get(path)
    assert (whole.status_code, whole["Content-Type"]) == (200, "image/png")
    assert whole["Content-Disposition"].startswith("attachment;")
    assert b"".join(whole.streaming_content) == PNG
    part = session.get(path, headers={"Range": "bytes=3-9"})
    assert (part.status_code, b"".join(part.streaming_content)) == (206, PNG[3:10])
    assert session.get(path, headers={"Range": "bytes=999999-"}).status_code == 416


def test_a_file_within_a_message_becomes_an_attachment(user, bucket):
    key = attached(user, {"fileName": "a.txt", "contentType": "text/plain", "sizeBytes": 5}, b"Hello")
    assert Attachment.objects.get(pk=key).status == "READY"
    assert contents(bucket) == [b"Hello"]


def test_the_signature_covers_type_size_digest_and_time(session, monkeypatch):
    monkeypatch.setattr("chats.attachments.ATTACHMENT_EXPIRY_SECONDS", 3600)
    upload = announce(session, PNG, contentType="image/png", sha256=digest(PNG)).json()["upload"]
    query = parse_qs(urlsplit(upload["url"]).query)
    assert query["X-Amz-SignedHeaders"] == ["content-length;content-type;host;x-amz-checksum-sha256"]
    assert query["X-Amz-Expires"][0] in ("3600", "3599")
    assert set(upload["headers"]) == {"Content-Type", "x-amz-checksum-sha256"}
    plain = announce(session).json()["upload"]
    assert parse_qs(urlsplit(plain["url"]).query)["X-Amz-SignedHeaders"] == ["content-length;content-type;host"]
    assert plain["headers"] == {"Content-Type": "text/plain"}


def test_completing_without_an_upload_is_409(session):
    answer = announce(session).json()
    assert code(complete(session, answer)) == (409, "CONFLICT")
    assert put(answer, b"Hello").status_code == 200
    assert complete(session, answer).status_code == 200


@pytest.mark.parametrize(
    ("content", "changes", "field"),
    [
        (b"Hello!", {}, "sizeBytes"),
        (b"Hallo", {"sha256": digest(b"Hello")}, "sha256"),
        (b"Hell\x00", {}, "contentType"),
    ],
)
def test_a_file_other_than_announced_is_400(session, bucket, content, changes, field):
    """The service checks the file even if the storage does not enforce the signed headers."""
    answer = announce(session, b"Hello", **changes).json()
    bucket.put_object(Key=f"attachments/{answer['id']}/upload", Body=content)
    assert list(fields(complete(session, answer))) == [field]
    assert contents(bucket) == [content]


def test_an_upload_after_the_completion_changes_nothing(session, bucket):
    answer = announce(session, b"first").json()
    put(answer, b"first")
    complete(session, answer)
    assert put(answer, b"other").status_code == 200  # the storage does not know of the completion
    content = session.get(f"/api/v1/attachments/{answer['id']}/content")
    assert b"".join(content.streaming_content) == b"first"
    assert complete(session, answer).json()["sha256"] == digest(b"first")


def test_an_attachment_not_completed_in_time_is_removed(session, bucket):
    late = announce(session).json()
    put(late, b"Hello")
    ready(session, b"ready")
    Attachment.objects.filter(status="PENDING").update(expires_at=clock.now() - timedelta(seconds=1))
    assert attachments.expire_attachments() == 1
    assert attachments.expire_attachments() == 0
    assert contents(bucket) == [b"ready"]


def test_no_repeat_extends_an_upload_address(session):
    """A later upload would be in the storage, but in no quota, and no task would remove it."""
    body = {"fileName": "a.txt", "contentType": "text/plain", "sizeBytes": 5}

    def seconds() -> int:
        answer = session.post("/api/v1/attachments", body, format="json", headers={"Idempotency-Key": "k"})
        return int(parse_qs(urlsplit(answer.json()["upload"]["url"]).query)["X-Amz-Expires"][0])

    assert seconds() > 60
    Attachment.objects.update(expires_at=clock.now() + timedelta(seconds=60))
    assert 50 <= seconds() <= 60
    Attachment.objects.update(expires_at=clock.now() - timedelta(hours=1))
    assert seconds() == 1


def test_an_upload_after_the_expiry_is_removed_with_its_row(session, bucket, settings):
    """It began in time, so the storage stored it."""
    settings.ATTACHMENT_UNUSED_DAYS = 1
    late = announce(session).json()
    Attachment.objects.update(expires_at=clock.now(), created_at=clock.now() - timedelta(days=2))
    assert attachments.expire_attachments() == 1
    put(late, b"Hello")
    assert contents(bucket) == [b"Hello"]
    assert attachments.purge_attachments() == 1
    assert contents(bucket) == []


def test_files_are_not_purged_while_their_upload_address_is_valid(session, user, bucket, settings, monkeypatch):
    settings.CHAT_RETENTION_DAYS = 0
    monkeypatch.setattr("chats.attachments.ATTACHMENT_EXPIRY_SECONDS", 3600)
    answer = announce(session).json()
    put(answer, b"Hello")
    complete(session, answer)
    message = factories.MessageFactory(chat__user=user)
    Attachment.objects.update(message=message)
    session.delete(f"/api/v1/chats/{message.chat_id}")
    assert chat_services.purge_chats() == 0
    put(answer, b"Hello")
    Chat.objects.update(deleted_at=clock.now() - timedelta(hours=1, seconds=1))
    assert chat_services.purge_chats() == 1
    assert contents(bucket) == []


def test_a_model_gets_the_beginning_of_a_file_without_the_rest(session, bucket, monkeypatch):
    name = Attachment.objects.get(pk=ready(session, b"Hello, world")["id"]).stored_name
    monkeypatch.setattr("config.storage.ObjectStorage._open", lambda *args: pytest.fail("the whole file was read"))
    assert attachments.files.read_file(name, 5, seconds=10) == b"Hello"
    assert attachments.files.read_file(name, 1000, seconds=10) == b"Hello, world"
    with pytest.raises(FileNotFoundError):
        attachments.files.read_file(f"{name}0", 5, seconds=10)


def test_an_unreachable_storage_is_503(session, settings, monkeypatch):
    kept = ready(session, b"Hello")
    answer = announce(session).json()
    settings.STORAGE_S3_ENDPOINT = "http://127.0.0.1:9"
    monkeypatch.setattr("config.storage.STORAGE_S3_TIMEOUT_SECONDS", 0.5)
    settings.STORAGES = dict(settings.STORAGES)
    assert code(complete(session, answer)) == (503, "UNAVAILABLE")
    assert code(session.get(f"/api/v1/attachments/{kept['id']}/content")) == (503, "UNAVAILABLE")
    assert announce(session).status_code == 201


def test_a_storage_that_fails_during_a_download_is_503(session, settings):
    """The file is there, but it cannot be read."""
    factories.ToolInvocationFactory(id="inv_1")
    of_tool = tool_files.store("inv_1", "a.txt", b"Hello").removeprefix(settings.BASE_URL)
    of_user = f"/api/v1/attachments/{ready(session, b'Hello')['id']}/content"

    def fail(**request: Any) -> None:
        raise EndpointConnectionError(endpoint_url="s3")

    events = default_storage.bucket.meta.client.meta.events
    events.register("before-call.s3.GetObject", fail)
    try:
        assert code(session.get(of_user)) == (503, "UNAVAILABLE")
        assert code(Client().get(of_tool)) == (503, "UNAVAILABLE")
    finally:
        events.unregister("before-call.s3.GetObject", fail)


def test_files_created_by_tools(bucket, settings):
    factories.ToolInvocationFactory(id="inv_1")
    url = tool_files.store("inv_1", "a.html", b"<b>half")
    assert tool_files.store("inv_1", "a.html", b"<b>whole") == url
    assert contents(bucket) == [b"<b>whole"]
    response = Client().get(url.removeprefix(settings.BASE_URL))
    assert response.status_code == 200
    assert b"".join(response.streaming_content) == b"<b>whole"
    assert response["Content-Type"] == "text/html; charset=utf-8"
    assert response["Content-Disposition"].startswith("attachment")
    assert Client().get(url.removeprefix(settings.BASE_URL).replace("a.html", "b.html")).status_code == 404
    tool_files.remove_all("inv_1")
    tool_files.remove_all("inv_1")
    assert contents(bucket) == []
