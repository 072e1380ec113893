"""What a server really does with conditional writes. Some refuse them, and some ignore the condition and overwrite."""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import dataclass

from capd.errors import ObjectStoreError
from capd.store.objects.bucket import Bucket

__all__ = ["Conditions", "probe"]

_NO_TAG = '"00000000000000000000000000000000"'


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a store enforces. creates: writes only if there is no object. matches: only over a known version."""

    creates: bool
    matches: bool

    @property
    def problem(self) -> str:
        """The consequence for the user; "" without one."""
        if self.creates and self.matches:
            return ""
        return (
            "the object store does not enforce conditional writes; "
            "see to it that only one daemon writes each prefix and node name"
        )


def probe(bucket: Bucket) -> Conditions:
    """Return what a store enforces, by a scratch object that is deleted again.

    Args:
        bucket: The place of the scratch object.

    Raises:
        ObjectStoreError: It cannot be written at all.
    """
    key = f".capd/probe-{secrets.token_hex(8)}"
    bucket.put(key, b"1")
    try:
        return Conditions(_is_refused(bucket, key, "create"), _is_refused(bucket, key, _NO_TAG))
    finally:
        with contextlib.suppress(ObjectStoreError):
            bucket.delete([key])


def _is_refused(bucket: Bucket, key: str, condition: str) -> bool:
    """Return whether a write whose condition does not hold is a conflict."""
    try:
        bucket.put(key, b"2", condition=condition)
    except ObjectStoreError as error:
        if error.reason == "conflict":
            return True
        if error.retry or error.reason in ("refused", "full", "missing", "unreachable"):
            raise
        # The store does not know the condition.
        return False
    return False
