"""What tests do with an S3 server at an address, whoever runs it."""

from __future__ import annotations

import dataclasses
import uuid
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tests.kit.objects.signing import ACCESS_KEY, REGION, SECRET_KEY, signed_request

if TYPE_CHECKING:
    from obstore.store import S3Store

__all__ = ["Bucket", "S3Service", "Upload"]


@dataclasses.dataclass(frozen=True)
class Upload:
    """A multipart upload that is neither complete nor aborted."""

    key: str
    id: str


class S3Service:
    """An address that speaks S3 and takes the tests' key.

    Attributes:
        endpoint: Its URL, http://127.0.0.1:PORT.
    """

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint

    def environment(self, bucket: str) -> dict[str, str]:
        """The variables from which obstore, boto3 and the AWS tools find the bucket's server and the key."""
        return {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": REGION,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_BUCKET": bucket,
        }

    def make_bucket(self, name: str | None = None) -> Bucket:
        """Make a bucket; without a name, one that nobody else has."""
        name = name or f"t-{uuid.uuid4().hex[:16]}"
        signed_request(self.endpoint, "PUT", f"/{name}")
        return Bucket(self, name)

    def drop_bucket(self, name: str) -> None:
        """Remove a bucket with all that lies in it."""
        signed_request(self.endpoint, "DELETE", f"/{name}")

    def uploads_of(self, bucket: str) -> list[Upload]:
        """The multipart uploads that somebody has begun and not ended."""
        answer = ET.fromstring(signed_request(self.endpoint, "GET", f"/{bucket}", [("uploads", "")]))  # noqa: S314
        return [
            Upload(one.findtext("{*}Key") or "", one.findtext("{*}UploadId") or "")
            for one in answer.iterfind("{*}Upload")
        ]

    def abort(self, bucket: str, upload: Upload) -> None:
        """Forget the parts of an upload."""
        signed_request(self.endpoint, "DELETE", f"/{bucket}/{upload.key}", [("uploadId", upload.id)])


@dataclasses.dataclass(frozen=True)
class Bucket:
    """A bucket of a service.

    Attributes:
        service: Where it is.
        name: Its name.
    """

    service: S3Service
    name: str

    def environment(self) -> dict[str, str]:
        """The variables from which obstore finds it."""
        return self.service.environment(self.name)

    def through(self, service: S3Service) -> Bucket:
        """The same bucket as a proxy shows it."""
        return Bucket(service, self.name)

    def url(self, prefix: str = "") -> str:
        """s3://NAME/PREFIX."""
        return f"s3://{self.name}/{prefix}".rstrip("/")

    def store(self, prefix: str | None = None, options: Mapping[str, Any] | None = None) -> S3Store:
        """An obstore store of the bucket.

        Args:
            prefix: The keys are below it.
            options: Further arguments of S3Store. They win over the address and key of the bucket.
        """
        from obstore.store import S3Store

        mine = {
            "endpoint": self.service.endpoint, "region": REGION, "access_key_id": ACCESS_KEY,
            "secret_access_key": SECRET_KEY, "client_options": {"allow_http": True},
        }  # fmt: skip
        return S3Store(self.name, prefix=prefix, **{**mine, **(options or {})})

    def keys(self, prefix: str = "") -> list[str]:
        """The keys of its objects."""
        return sorted(one["path"] for page in self.store().list(prefix) for one in page)

    def uploads(self) -> list[Upload]:
        """Its multipart uploads that nobody has ended."""
        return self.service.uploads_of(self.name)

    def abort(self, upload: Upload) -> None:
        """Forget the parts of an upload."""
        self.service.abort(self.name, upload)
