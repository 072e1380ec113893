"""The address of something in an object store: a scheme, a bucket and a key, such as s3://bucket/runs/exp7.zarr."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from capd.errors import ConfigError

__all__ = ["SCHEMES", "Address", "RunPlace", "is_address", "parse_address", "place_of"]

SCHEMES = ("s3", "gs", "az", "file")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
# `pathlib` folds the two slashes of an address into one.
_FOLDED = re.compile(rf"({'|'.join(SCHEMES)}):/(?!/)")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_MAX_KEY_CHARS = 900


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """The address of a run, of a prefix with runs, or of an object.

    Attributes:
        scheme: One of SCHEMES.
        bucket: The bucket or container; "" for `file`.
        key: The key without slashes at its ends; "" for the whole bucket. For `file`, the absolute path without its
            first slash.
    """

    scheme: str
    bucket: str
    key: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.key}".removesuffix("/")

    def __truediv__(self, name: str) -> Address:
        return Address(self.scheme, self.bucket, f"{self.key}/{name}".strip("/"))

    @property
    def name(self) -> str:
        """The last part of the key; the bucket if there is no key."""
        return self.key.rpartition("/")[2] or self.bucket

    @property
    def stem(self) -> str:
        """The name without its suffix."""
        return self.name.removesuffix(".zarr")

    @property
    def parent(self) -> Address:
        """The address above this one."""
        return Address(self.scheme, self.bucket, self.key.rpartition("/")[0])

    @property
    def is_run(self) -> bool:
        """Whether the name is the one of a run."""
        return self.name.endswith(".zarr")


RunPlace: TypeAlias = Path | Address
"""Where a run or a directory of runs is: on a file system, or in an object store."""


def is_address(text: str | os.PathLike[str]) -> bool:
    """Return whether a text is the address of an object store, and no path."""
    text = os.fspath(text)
    return bool(_SCHEME.match(text) or _FOLDED.match(text))


def parse_address(text: str | os.PathLike[str]) -> Address:
    """Return the address that a text names.

    Raises:
        ConfigError: The scheme is unknown, or the bucket or the key is not valid.
    """
    given = os.fspath(text)
    if (folded := _FOLDED.match(given)) is not None:
        given = f"{folded[1]}://{given[folded.end() :]}"
    found = _SCHEME.match(given)
    if found is None or found[1] not in SCHEMES:
        raise ConfigError(
            f"{given!r} is no address of an object store; write s3://BUCKET/PREFIX, gs://…, az://… or file:///PATH"
        )
    if "@" in given[found.end() :].partition("/")[0] or "?" in given:
        # The text may hold a key, so it is not repeated.
        raise ConfigError(
            f"an address has no keys and no query: {found[1]}://BUCKET/PREFIX; credentials come from the environment "
            "or a profile"
        )
    if any(char in given for char in "#\\") or not given.isprintable():
        raise ConfigError(f"{given!r}: an address has no #, backslash or control character")
    rest = given[found.end() :]
    bucket, _, key = rest.partition("/")
    key = key.strip("/")
    if found[1] == "file":
        if bucket:
            raise ConfigError(f"{given!r}: write file:/// and an absolute path")
    elif not _BUCKET.fullmatch(bucket):
        raise ConfigError(f"{given!r} names no bucket; write {found[1]}://BUCKET/PREFIX")
    if any(part in ("", ".", "..") for part in key.split("/")) and key:
        raise ConfigError(f"{given!r}: an address has no empty part, no . and no ..")
    if len(key) > _MAX_KEY_CHARS:
        raise ConfigError(f"{given!r}: the key is longer than {_MAX_KEY_CHARS} characters")
    return Address(found[1], bucket, key)


def place_of(given: str | os.PathLike[str] | Address) -> RunPlace:
    """Return the address that a text names, or the path that it is.

    Raises:
        ConfigError: It is an address that is not valid.
    """
    if isinstance(given, Address):
        return given
    return parse_address(given) if is_address(given) else Path(given)
