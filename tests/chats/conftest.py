"""Helpers that announce, upload and complete attachments with the test client."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
from django.core.files.storage import default_storage
from django.test import Client
from rest_framework.test import APIClient

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 4


@pytest.fixture(autouse=True)
def storage(tmp_path: Path, settings: Any) -> Path:
    """An empty folder for the file storage."""
    settings.MEDIA_ROOT = tmp_path / "files"
    return tmp_path / "files"


def stored() -> list[bytes]:
    """Return the content of each file in the storage."""
    root = Path(default_storage.location)
    return sorted(file.read_bytes() for file in root.rglob("*") if file.is_file())


def announce(client: APIClient, content: bytes = b"Hello", base: str = "/api/v1", **changes: Any) -> Any:
    body = {"fileName": "a.txt", "contentType": "text/plain", "sizeBytes": len(content)} | changes
    return client.post(f"{base}/attachments", body, format="json")


def upload(answer: dict[str, Any], content: bytes, **extra: Any) -> Any:
    """Upload to the signed address. The request has no token."""
    url = answer["upload"]["url"].partition("://")[2].partition("/")[2]
    return Client().put(f"/{url}", content, content_type="application/octet-stream", **extra)


def complete(client: APIClient, attachment: dict[str, Any], base: str = "/api/v1") -> Any:
    return client.post(f"{base}/attachments/{attachment['id']}/complete", {}, format="json")


def ready(client: APIClient, content: bytes = b"Hello", **changes: Any) -> dict[str, Any]:
    answer = announce(client, content, **changes).json()
    assert upload(answer, content).status_code == 204
    done = complete(client, answer)
    assert done.status_code == 200, done.content
    return done.json()


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def fields(response: Any, status: int = 400) -> dict[str, list[str]]:
    """Return the fields that the error response names, with their problems."""
    assert response.status_code == status, response.content
    return response.json()["error"]["details"]["fields"]


def code(response: Any) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]
