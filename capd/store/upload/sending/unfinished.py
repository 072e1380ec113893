"""Uploads in parts that a kill left unfinished. Their parts are invisible, and cost space until somebody aborts them.

obstore can neither list nor abort them. A lifecycle rule of the bucket (AbortIncompleteMultipartUpload) does the same.
"""

from __future__ import annotations

import datetime
import xml.etree.ElementTree as ET
from collections.abc import Callable

from capd.errors import ObjectStoreError
from capd.store.disk.failpoints import failpoint
from capd.store.objects.address import Address
from capd.store.upload.sending.signed_request import S3Requests

__all__ = ["abort_unfinished", "aborts_unfinished"]

_MAX_PAGES = 100


def abort_unfinished(run: Address, owns: Callable[[str], bool], before_s: float) -> int:
    """Abort the unfinished uploads of a run that began before a time. Return their number.

    Args:
        run: The address of the run.
        owns: Returns whether a key below the run is one of this node.
        before_s: The time, as seconds since 1970.

    Raises:
        ObjectStoreError: The store does not answer. A store that knows no such list has none.
    """
    requests = S3Requests.to(run)
    if requests is None:
        return 0
    aborted, marker = 0, ("", "")
    for _ in range(_MAX_PAGES):
        query = [("uploads", ""), ("prefix", f"{run.key}/")]
        query += [("key-marker", marker[0]), ("upload-id-marker", marker[1])] if marker[0] else []
        page = _parsed(requests.ask("GET", "", query), run)
        for one in page.iterfind("{*}Upload"):
            key, identity = one.findtext("{*}Key") or "", one.findtext("{*}UploadId") or ""
            below = key.removeprefix(f"{run.key}/")
            is_ours = below != key and owns(below)
            if is_ours and identity and _begun_s(one.findtext("{*}Initiated") or "") < before_s:
                failpoint("upload.before_abort")
                requests.ask("DELETE", key, [("uploadId", identity)])
                aborted += 1
        if (page.findtext("{*}IsTruncated") or "") != "true":
            break
        marker = page.findtext("{*}NextKeyMarker") or "", page.findtext("{*}NextUploadIdMarker") or ""
    return aborted


def aborts_unfinished(address: Address) -> bool | None:
    """Return whether a lifecycle rule of the bucket aborts unfinished uploads; None if nobody can tell."""
    requests = S3Requests.to(address)
    if requests is None:
        return None
    try:
        return b"AbortIncompleteMultipartUpload" in requests.ask("GET", "", [("lifecycle", "")])
    except ObjectStoreError as error:
        # 404: there is no rule at all.
        return False if error.reason == "missing" else None


def _parsed(payload: bytes, run: Address) -> ET.Element:
    # Entities of a document type could grow without limit.
    if b"<!" in payload:
        raise ObjectStoreError(f"{run}: the list of unfinished uploads is not plain XML")
    try:
        return ET.fromstring(payload)  # noqa: S314 - without a document type
    except ET.ParseError as error:
        raise ObjectStoreError(f"{run}: the list of unfinished uploads is not XML") from error


def _begun_s(text: str) -> float:
    """Return the time of an upload; infinity if it cannot be read."""
    try:
        return datetime.datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return float("inf")
