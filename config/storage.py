"""Files in an S3-compatible storage. Only Django loads this module, by its name: loading boto3 takes a second."""

import base64
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from botocore.config import Config
from botocore.exceptions import ClientError
from django.conf import settings
from storages.backends.s3 import S3Storage
from storages.utils import clean_name

# Time limit of each request to the bucket.
STORAGE_S3_TIMEOUT_SECONDS = 10

# A file that is read is kept in memory up to this size, and otherwise on disk.
SPOOL_BYTES = 1024 * 1024
ATTEMPTS = 3


class ObjectStorage(S3Storage):
    def get_default_settings(self) -> dict[str, Any]:
        return super().get_default_settings() | {
            "bucket_name": settings.STORAGE_S3_BUCKET,
            "endpoint_url": settings.STORAGE_S3_ENDPOINT or None,
            "region_name": settings.STORAGE_S3_REGION,
            # Without keys, the SDK uses its usual sources: its variables and files, or the role of the machine.
            "access_key": settings.STORAGE_S3_ACCESS_KEY or None,
            "secret_key": settings.STORAGE_S3_SECRET_KEY or None,
            "security_token": None,
            "max_memory_size": SPOOL_BYTES,
            "client_config": Config(
                s3={"addressing_style": settings.STORAGE_S3_ADDRESSING},
                signature_version="s3v4",
                connect_timeout=STORAGE_S3_TIMEOUT_SECONDS,
                read_timeout=STORAGE_S3_TIMEOUT_SECONDS,
                retries={"total_max_attempts": ATTEMPTS, "mode": "standard"},
                # Servers of other vendors reject the checksums that newer SDKs add by default.
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        }

    def first_parts(self, name: str, size: int, part_size: int) -> Iterator[bytes]:
        """The first ``size`` bytes, as they arrive; ``open`` reads the whole file first. Raises FileNotFoundError."""
        key = self._normalize_name(clean_name(name))
        try:
            body = self.bucket.Object(key).get(Range=f"bytes=0-{size - 1}")["Body"]
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] == 404:
                raise FileNotFoundError(name) from None
            raise
        with closing(body):
            yield from body.iter_chunks(part_size)

    def presign_put(
        self, name: str, *, content_type: str, size: int, sha256: str | None, seconds: int
    ) -> tuple[str, dict[str, str]]:
        """A URL and headers for a PUT of exactly this file: its type, size and digest (hex) are signed."""
        params: dict[str, Any] = {"Bucket": self.bucket_name, "Key": self._normalize_name(clean_name(name))}
        params |= {"ContentType": content_type, "ContentLength": size}
        headers = {"Content-Type": content_type}
        if sha256 is not None:
            digest = base64.b64encode(bytes.fromhex(sha256)).decode()
            params["ChecksumSHA256"] = headers["x-amz-checksum-sha256"] = digest
        url = self.connection.meta.client.generate_presigned_url("put_object", Params=params, ExpiresIn=seconds)
        return url, headers
