"""Requests that obstore has no call for, such as the list of unfinished uploads, signed with signature version 4.

They need static keys, from the environment or a profile. Other credentials (roles of machines) are obstore's own.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import os
import time
import urllib.parse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

from capd.errors import ConfigError, ObjectStoreError
from capd.store.objects.address import Address
from capd.store.objects.credentials import store_options

__all__ = ["S3Requests"]

_TIMEOUT_S = 20.0
_MAX_ANSWER_NBYTES = 16 << 20
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_EMPTY = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True)
class S3Requests:
    """Signed requests to the bucket of an address.

    Attributes:
        endpoint: The URL of the server.
        bucket: The path of the bucket there; "" if its host name has the bucket.
        region: The region.
        access_key: The access key.
        secret_key: The secret key.
        token: The token of a session; "" without one.
    """

    endpoint: str
    bucket: str
    region: str
    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)
    token: str = field(default="", repr=False)

    @classmethod
    def to(cls, address: Address, environ: Mapping[str, str] = os.environ) -> S3Requests | None:
        """Return the way to the bucket of an address; None for other stores, and without static keys."""
        if address.scheme != "s3":
            return None
        try:
            options = store_options(address, environ)
        except ConfigError:
            return None
        access = environ.get("AWS_ACCESS_KEY_ID") or options.get("access_key_id", "")
        secret = environ.get("AWS_SECRET_ACCESS_KEY") or options.get("secret_access_key", "")
        token = environ.get("AWS_SESSION_TOKEN") or options.get("session_token", "")
        region = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or options.get("region", "")
        endpoint = next(
            (environ[name] for name in _ENDPOINTS if environ.get(name)), options.get("endpoint", "")
        )
        if not access or not secret:
            return None
        if endpoint:
            return cls(endpoint.rstrip("/"), f"/{address.bucket}", region, access, secret, token)
        host = f"https://{address.bucket}.s3.{region}.amazonaws.com"
        return cls(host, "", region, access, secret, token)

    def ask(self, method: str, key: str = "", query: Iterable[tuple[str, str]] = ()) -> bytes:
        """Ask without a body, and return the body of the answer.

        Args:
            method: GET or DELETE.
            key: The key of an object; "" for the bucket.
            query: The names and values of the query.

        Raises:
            ObjectStoreError: The server does not answer, or refuses.
        """
        place = urllib.parse.urlsplit(self.endpoint)
        path = urllib.parse.quote(f"{place.path}{self.bucket}/{key}", safe="/-_.~")
        pairs = "&".join(f"{_quoted(name)}={_quoted(value)}" for name, value in sorted(query))
        headers = self._signed(method, place.netloc, path, pairs)
        kind = http.client.HTTPSConnection if place.scheme == "https" else http.client.HTTPConnection
        connection = kind(place.netloc, timeout=_TIMEOUT_S)
        try:
            connection.request(method, f"{path}?{pairs}" if pairs else path, None, headers)
            answer = connection.getresponse()
            body = answer.read(_MAX_ANSWER_NBYTES)
        except (OSError, http.client.HTTPException) as error:
            raise ObjectStoreError(
                f"{self.endpoint} does not answer ({type(error).__name__})", reason="unreachable", retry=True
            ) from error
        finally:
            connection.close()
        if answer.status >= 300:
            reason = "missing" if answer.status == HTTPStatus.NOT_FOUND else "other"
            raise ObjectStoreError(f"{self.endpoint} answers {method} with {answer.status}", reason=reason)
        return body

    def _signed(self, method: str, host: str, path: str, pairs: str) -> dict[str, str]:
        moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        headers = {"host": host, "x-amz-content-sha256": _EMPTY, "x-amz-date": moment}
        if self.token:
            headers["x-amz-security-token"] = self.token
        names = ";".join(sorted(headers))
        request = "\n".join(
            [method, path, pairs, *(f"{name}:{headers[name]}" for name in sorted(headers)), "", names, _EMPTY]
        )
        scope = f"{moment[:8]}/{self.region}/s3/aws4_request"
        text = f"AWS4-HMAC-SHA256\n{moment}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
        key = f"AWS4{self.secret_key}".encode()
        for word in scope.split("/"):
            key = hmac.digest(key, word.encode(), "sha256")
        signature = hmac.digest(key, text.encode(), "sha256").hex()
        headers["authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={self.access_key}/{scope}, SignedHeaders={names}, Signature={signature}"
        )
        return headers


def _quoted(text: str) -> str:
    return urllib.parse.quote(text, safe="-_.~")
