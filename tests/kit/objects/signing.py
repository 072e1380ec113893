"""Signed requests to an S3 server: what tests ask it and obstore has no call for."""

from __future__ import annotations

import hashlib
import hmac
import http.client
import time
import urllib.parse
from collections.abc import Iterable, Mapping

__all__ = ["ACCESS_KEY", "REGION", "SECRET_KEY", "authorization", "signed_request"]

ACCESS_KEY = "capd-test-key"
SECRET_KEY = "capd-test-secret"  # noqa: S105 - of a server that lives as long as the tests
REGION = "us-east-1"
_PATIENCE_S = 30.0


def authorization(method: str, target: str, headers: Mapping[str, str]) -> str:
    """The Authorization header of a request, after signature version 4.

    Args:
        method: Its method.
        target: Its path and query as they are sent.
        headers: Those that are signed. X-Amz-Date and X-Amz-Content-Sha256 are among them.
    """
    values = {name.lower(): " ".join(value.split()) for name, value in headers.items()}
    names = sorted(values)
    path, _, query = target.partition("?")
    pairs = sorted(urllib.parse.parse_qsl(query, keep_blank_values=True))
    request = "\n".join([
        method,
        path,
        "&".join(f"{_quoted(name)}={_quoted(value)}" for name, value in pairs),
        *(f"{name}:{values[name]}" for name in names),
        "",
        ";".join(names),
        values["x-amz-content-sha256"],
    ])  # fmt: skip
    moment = values["x-amz-date"]
    scope = f"{moment[:8]}/{REGION}/s3/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{moment}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    key = f"AWS4{SECRET_KEY}".encode()
    for word in scope.split("/"):
        key = hmac.digest(key, word.encode(), "sha256")
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    return (
        f"AWS4-HMAC-SHA256 Credential={ACCESS_KEY}/{scope}, "
        f"SignedHeaders={';'.join(names)}, Signature={signature}"
    )


def signed_request(
    endpoint: str, method: str, path: str, query: Iterable[tuple[str, str]] = (), body: bytes = b""
) -> bytes:
    """Ask the server and return the body of its answer.

    Raises:
        AssertionError: The answer is no success.
    """
    place = urllib.parse.urlsplit(endpoint)
    target = urllib.parse.quote(path)
    pairs = "&".join(f"{_quoted(name)}={_quoted(value)}" for name, value in query)
    if pairs:
        target += f"?{pairs}"
    headers = {
        "Host": place.netloc,
        "X-Amz-Content-Sha256": hashlib.sha256(body).hexdigest(),
        "X-Amz-Date": time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()),
    }
    headers["Authorization"] = authorization(method, target, headers)
    connection = http.client.HTTPConnection(place.netloc, timeout=_PATIENCE_S)
    try:
        connection.request(method, target, body or None, headers)
        answer = connection.getresponse()
        text = answer.read()
    finally:
        connection.close()
    assert answer.status < 300, f"{method} {target}: {answer.status} {text.decode(errors='replace')}"
    return text


def _quoted(text: str) -> str:
    return urllib.parse.quote(text, safe="-_.~")
