"""Files in an S3-compatible object storage, as STORAGE_S3_* name it: Django's storage API, and addresses to upload to.

Imported only where STORAGES names it: loading boto3 takes a second.
"""

from __future__ import annotations

import base64
from typing import Any

from botocore.config import Config
from django.conf import settings
from storages.backends.s3 import S3Storage
from storages.utils import clean_name

# What is read from the storage is spooled in memory up to here, then on disk.
SPOOL_BYTES = 1024 * 1024
ATTEMPTS = 3


class ObjectStorage(S3Storage):
    def get_default_settings(self) -> dict[str, Any]:
        seconds = settings.STORAGE_S3_TIMEOUT_SECONDS
        return super().get_default_settings() | {
            "bucket_name": settings.STORAGE_S3_BUCKET,
            "endpoint_url": settings.STORAGE_S3_ENDPOINT or None,
            "region_name": settings.STORAGE_S3_REGION,
            # Without keys here, the SDK looks where it always does: its own variables, files, the machine's role.
            "access_key": settings.STORAGE_S3_ACCESS_KEY or None,
            "secret_key": settings.STORAGE_S3_SECRET_KEY or None,
            "security_token": None,
            "max_memory_size": SPOOL_BYTES,
            "client_config": Config(
                s3={"addressing_style": settings.STORAGE_S3_ADDRESSING},
                signature_version="s3v4",
                connect_timeout=seconds,
                read_timeout=seconds,
                retries={"total_max_attempts": ATTEMPTS, "mode": "standard"},
                # Other vendors' servers refuse the checksums that newer SDKs add by themselves.
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        }

    def presign_put(
        self, name: str, *, content_type: str, size: int, sha256: str | None, seconds: int
    ) -> tuple[str, dict[str, str]]:
        """An address that takes exactly such a file by PUT for so long, and the headers to send with it.

        Type, size and digest are part of the signature: a PUT of anything else is refused by the storage.
        """
        params: dict[str, Any] = {
            "Bucket": self.bucket_name,
            "Key": self._normalize_name(clean_name(name)),
            "ContentType": content_type,
            "ContentLength": size,
        }
        headers = {"Content-Type": content_type}
        if sha256 is not None:
            digest = base64.b64encode(bytes.fromhex(sha256)).decode()
            params["ChecksumSHA256"] = headers["x-amz-checksum-sha256"] = digest
        url = self.connection.meta.client.generate_presigned_url("put_object", Params=params, ExpiresIn=seconds)
        return url, headers
