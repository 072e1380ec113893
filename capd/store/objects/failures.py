"""The failures of object stores as errors that say in one line what happened, and what to do next."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Final

from capd.errors import CapdError, ObjectStoreError
from capd.store.objects.address import Address

__all__ = ["REASONS", "translated"]

REASONS: Final = ("unreachable", "refused", "missing", "conflict", "full", "other")
"""The words of `ObjectStoreError.reason`."""

# The code in an answer of S3, such as <Code>AccessDenied</Code>.
_CODE = re.compile(r"<Code>(\w+)</Code>")
_MESSAGE = re.compile(r"<Message>([^<]+)</Message>")
_STATUS = re.compile(r"status(?: code)?:? (4\d\d|5\d\d)\b")
_MAX_TEXT_CHARS = 200
_KEYS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
_SAID = {
    "RequestTimeTooSkewed": (
        "refused",
        "the clock of this machine is off; set it, for example with `chronyc makestep`",
    ),
    "InvalidAccessKeyId": ("refused", f"the store does not know the access key; check {_KEYS}"),
    "SignatureDoesNotMatch": ("refused", f"the secret key does not fit; check {_KEYS}"),
    "ExpiredToken": ("refused", "the session token has expired; get a new one"),
    "AccessDenied": ("refused", f"access is denied; check {_KEYS} and the policy of the bucket"),
    "NoSuchBucket": ("missing", "there is no such bucket; create it, or correct the address"),
    "QuotaExceeded": ("full", "the bucket is full; free space there, or raise its quota"),
    "InsufficientStorage": ("full", "the bucket is full; free space there, or raise its quota"),
    "XMinioStorageFull": ("full", "the bucket is full; free space there, or raise its quota"),
    "NotImplemented": ("other", "the store does not support this request"),
}
_OF_STATUS = {
    401: "AccessDenied", 403: "AccessDenied", 501: "NotImplemented", 507: "InsufficientStorage",
}  # fmt: skip


@contextlib.contextmanager
def translated(address: Address) -> Iterator[None]:
    """Raise an exception of obstore as an ObjectStoreError that names the address.

    A missing object is an ObjectStoreError that is also a FileNotFoundError.
    """
    try:
        yield
    except (CapdError, GeneratorExit):
        raise
    except Exception as error:
        raise _failure(address, error) from error
    except BaseException as error:
        # A panic of obstore's Rust code is no Exception, and would end the thread.
        if type(error).__name__ != "PanicException":
            raise
        raise ObjectStoreError(f"{address}: obstore failed ({_short(str(error))})", retry=True) from error


class _Missing(ObjectStoreError, FileNotFoundError):
    """There is no object at the address."""

    __str__ = Exception.__str__


def _failure(address: Address, error: Exception) -> ObjectStoreError:
    kind, text = type(error).__name__, str(error)
    if isinstance(error, NotImplementedError):
        # A directory has no conditional replacement.
        return ObjectStoreError(f"{address}: {_SAID['NotImplemented'][1]}", reason="other")
    code, status = _CODE.search(text), _STATUS.search(text)
    word = code[1] if code else _OF_STATUS.get(int(status[1]), "") if status else ""
    if word in _SAID:
        reason, what = _SAID[word]
        return ObjectStoreError(f"{address}: {what}", reason=reason, retry=reason == "full")
    if isinstance(error, FileNotFoundError) or kind == "NotFoundError":
        return _Missing(f"{address}: there is no such object", reason="missing")
    if kind in ("AlreadyExistsError", "PreconditionError") or word in (
        "PreconditionFailed",
        "ConditionalRequestConflict",
    ):
        return ObjectStoreError(f"{address}: another writer changed it", reason="conflict")
    if isinstance(error, NotImplementedError):
        return ObjectStoreError(f"{address}: {_SAID['NotImplemented'][1]}", reason="other")
    if kind in ("PermissionDeniedError", "UnauthenticatedError"):
        return ObjectStoreError(f"{address}: {_SAID['AccessDenied'][1]}", reason="refused")
    if isinstance(error, (ValueError, TypeError)):
        return ObjectStoreError(f"{address}: {_short(text)}", reason="other")
    if (
        "redential" in text
        or "AccessKey" in text
        or "metadata endpoint" in text
        or "169.254" in text
        or "/latest/api/token" in text
    ):
        return ObjectStoreError(f"{address}: no credentials found; set {_KEYS}", reason="refused", retry=True)
    if status and status[1][0] == "4":
        message = _MESSAGE.search(text)
        said = f"{word or status[1]}: {_short(message[1] if message else text)}"
        return ObjectStoreError(f"{address}: the store refuses ({said})", reason="other")
    if isinstance(error, OSError):
        return ObjectStoreError(f"{address}: {_short(text)}", reason="other", retry=True)
    return ObjectStoreError(
        f"{address}: the store does not answer ({_short(text)}); check the address and AWS_ENDPOINT_URL",
        reason="unreachable",
        retry=True,
    )


def _short(text: str) -> str:
    """Return an error's text in one line, without its chain of causes in Rust."""
    line = " ".join(text.partition("\n\nDebug source")[0].split())
    return line if len(line) <= _MAX_TEXT_CHARS else f"{line[:_MAX_TEXT_CHARS]}…"
